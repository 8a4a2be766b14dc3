"""Constraint: the grammar state of one completion."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import contextmanager
from hashlib import blake2b
from time import thread_time
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher

from nanoengine.features.structured.long_text import LongText
from nanoengine.features.thought import ThoughtReader

SLOW = 0.05
"""CPU seconds of a mask above which it counts as slow: the other sequences of the step wait for it."""

MAX_SLOW_SECONDS = 0.5
"""Limit of the sum of the CPU seconds beyond `SLOW` of one text."""

MAX_FORCED_TEXTS = 256
"""Grammar states with cached forced tokens."""


class ForcedText(NamedTuple):
    """The next tokens that are the only allowed ones, and whether their text is long."""

    tokens: list[int]
    is_long: bool


class Constraint:
    """The state of a grammar behind the known tokens. One thread at a time may use it.

    Args:
        matcher: at the beginning of the text.
        thought: reader of the thought before the answer, which reads tokens before this does: the grammar holds from the answer
            on. None: from the beginning.
        name: of the grammar; constraints with the same name behind the same tokens have the same `state`.
        long_text: makes tokens of a long forced text; None: llguidance does.
        is_large: whether the grammar may have such a text.
        cache: forced tokens, by `state`.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        thought: ThoughtReader | None = None,
        *,
        name: bytes = b"",
        long_text: LongText | None = None,
        is_large: bool = False,
        cache: dict[bytes, ForcedText] | None = None,
    ):
        self.matcher, self.thought, self.is_large = matcher, thought, is_large
        self._tokens = blake2b(name or secrets.token_bytes(32))
        self.long_text, self.cache = long_text, {} if cache is None else cache
        self.num_read = 0  # tokens of the output
        self.last: int | None = None  # token that the grammar has read
        self.is_watched = False  # its masks may be slow, and are filled alone
        self.is_long = False  # whether a long text is forced
        self.ahead: Future[np.ndarray] | None = None  # the mask of this state, filled in advance
        self.slow_seconds = 0.0
        self.failure = ""  # error of another constraint in the same state

    def read(self, tokens: Seq[int]) -> None:
        """Add the next tokens of the output."""
        start = 0 if self.thought is None else self.thought.answer_start
        self.num_read += len(tokens)
        if start is not None and start < self.num_read:
            of_answer = list(tokens[max(0, start - self.num_read + len(tokens)) :])
            self.ahead = None
            self._tokens.update(np.array(of_answer, np.int64).tobytes())
            self.last = of_answer[-1] if of_answer else self.last
            with self.timed():
                self.matcher.consume_tokens(of_answer)

    @property
    def state(self) -> bytes:
        """A digest of the grammar and of its tokens."""
        return self._tokens.digest()

    @property
    def holds(self) -> bool:
        """Whether the next token must obey the grammar, or begin a thought."""
        return self.thought is None or not self.thought.is_open or bool(self.thought.begins)

    @property
    def also(self) -> tuple[int, ...]:
        """Allowed tokens beside those of the grammar: the begin of a thought."""
        return () if self.thought is None else self.thought.begins

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measures the CPU time of this thread for the constraint."""
        start = thread_time()
        yield
        seconds = thread_time() - start
        self.is_watched |= seconds > SLOW
        self.slow_seconds += max(0.0, seconds - SLOW)

    @property
    def error(self) -> str:
        """The reason why the grammar has exceeded its limits, or ""."""
        if self.slow_seconds > MAX_SLOW_SECONDS:
            return f"the grammar takes more than {SLOW:g} s for a token, again and again: make it simpler"
        return self.failure or str(self.matcher.get_error())

    def forced(self, most: int) -> list[int]:
        """The next tokens that are the only allowed ones, at most `most`: the tokenization of the forced text."""
        if not self.holds or self.also:
            return []
        if (known := self.cache.get(self.state)) is None:
            if (tokens := self.long_tokens() if self.is_long else None) is not None:
                return tokens[:most]
            if self.is_watched or (self.is_large and self.ahead is None):
                return []
            with self.timed():
                known = self._store(list(self.matcher.compute_ff_tokens()), is_long=False)
        return known.tokens[:most]

    def long_tokens(self) -> list[int] | None:
        """The next tokens of a long forced text; None without one."""
        if (known := self.cache.get(self.state)) is None:
            tokens = self._long_tokens()
            self.is_long = tokens is not None
            return None if tokens is None else self._store(tokens, is_long=True).tokens
        self.is_long = known.is_long
        return known.tokens if known.is_long else None

    def _long_tokens(self) -> list[int] | None:
        return None if self.long_text is None else self.long_text.tokens(self.matcher, self.last)

    def _store(self, tokens: list[int], *, is_long: bool) -> ForcedText:
        if len(self.cache) >= MAX_FORCED_TEXTS:
            self.cache.clear()
        self.cache[self.state] = forced = ForcedText(tokens, is_long)
        return forced

    def fill_ahead(self, num_words: int) -> np.ndarray:
        """The mask of this state: [words] int32."""
        bits = np.zeros(num_words, np.int32)
        self.is_watched = False
        with self.timed():
            self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self.error:  # otherwise the mask would allow an end
            bits[:] = 0
        self.long_tokens()
        return bits

    def fill_long(self, bits: np.ndarray, drafts: Seq[int]) -> bool:
        """Fill the masks of a long forced text, behind each of some drafts. Returns False without such a text.

        Args:
            bits: zeros [1 + num_drafts, words] int32.
        """
        before, count = self.last, 0
        try:
            for row, draft in zip(bits, (*drafts, None), strict=True):
                if (tokens := self._long_tokens()) is not None:
                    row[tokens[0] // 32] |= np.uint32(1 << tokens[0] % 32).astype(np.int32)
                elif count:
                    self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
                else:
                    self.is_long = False
                    return False
                if draft is None or not row[draft // 32] >> (draft % 32) & 1 or not self.matcher.consume_token(draft):
                    break
                self.last, count = draft, count + 1
        finally:
            if count:
                self.matcher.rollback(count)
            self.last = before
        return True

    def allowed(self, drafts: list[int]) -> list[int]:
        """The drafts before the first that is not allowed; none from the end of a thought on."""
        if self.thought is not None and self.thought.is_open:
            return self.thought.allowed(drafts)
        if not drafts or self.is_watched:
            return []
        with self.timed():
            return drafts[: self.matcher.validate_tokens(drafts)]
