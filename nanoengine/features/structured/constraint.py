"""Constraint: what a grammar says of one completion."""

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
from nanoengine.thought import ThoughtReader

SLOW = 0.05
"""Seconds of a CPU: hardly any text takes as much for a token, and all others of the step wait for it."""

MAX_SLOW_SECONDS = 0.5
"""That one text may take beyond `SLOW` for each of its tokens, all in all."""


MAX_SHARED = 256
"""States whose forced tokens are kept."""


class Forced(NamedTuple):
    """The next tokens, of which there is no choice, and whether the text is long."""

    tokens: list[int]
    is_long: bool


class Constraint:
    """The state of a grammar behind the tokens that are known. One thread at a time may use it.

    Args:
        matcher: behind the empty text.
        thought: that comes first, and is read before this is: the grammar holds from the answer on. None: from the beginning.
        name: of the grammar; constraints with the same one, behind the same tokens, have the same `state`.
        long_text: makes tokens of a long text that must come; None: llguidance does.
        is_large: the grammar may hold such a text.
        shared: forced tokens, by `state`.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        thought: ThoughtReader | None = None,
        *,
        name: bytes = b"",
        long_text: LongText | None = None,
        is_large: bool = False,
        shared: dict[bytes, Forced] | None = None,
    ):
        self.matcher, self.thought, self.is_large = matcher, thought, is_large
        self._tokens = blake2b(name or secrets.token_bytes(32))
        self.long_text, self.shared = long_text, {} if shared is None else shared
        self.num_read = 0  # tokens of the output
        self.last: int | None = None  # of those that the grammar has read
        self.is_watched = False  # it may be slow: its masks are filled alone
        self.is_long = False  # the text that must come
        self.ahead: Future[np.ndarray] | None = None  # the mask of this state
        self.slow_seconds = 0.0
        self.failure = ""  # of another one in the same state

    def read(self, tokens: Seq[int]) -> None:
        """These tokens of the output come next."""
        start = 0 if self.thought is None else self.thought.answer_start
        self.num_read += len(tokens)
        if start is not None and start < self.num_read:
            own = list(tokens[max(0, start - self.num_read + len(tokens)) :])
            self.ahead = None
            self._tokens.update(np.array(own, np.int64).tobytes())
            self.last = own[-1] if own else self.last
            with self.timed():
                self.matcher.consume_tokens(own)

    @property
    def state(self) -> bytes:
        """The same for the same grammar behind the same tokens."""
        return self._tokens.digest()

    @property
    def holds(self) -> bool:
        """Whether the next token must obey the grammar, or begin a thought."""
        return self.thought is None or not self.thought.is_open or bool(self.thought.begins)

    @property
    def also(self) -> tuple[int, ...]:
        """Tokens that may come beside those of the grammar."""
        return () if self.thought is None else self.thought.begins

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around what this thread does for it."""
        start = thread_time()
        yield
        seconds = thread_time() - start
        self.is_watched |= seconds > SLOW
        self.slow_seconds += max(0.0, seconds - SLOW)

    @property
    def error(self) -> str:
        """Why the grammar cannot go on: it was too much for its limits; "" if it can."""
        if self.slow_seconds > MAX_SLOW_SECONDS:
            return f"the grammar takes more than {SLOW:g} s for a token, again and again: make it simpler"
        return self.failure or str(self.matcher.get_error())

    def forced(self, most: int) -> list[int]:
        """The next tokens, as far as there is no choice: what the tokenizer would make of the text that must come."""
        if not self.holds:
            return [] if self.thought is None else self.thought.forced(most)
        if self.also:
            return []
        if (known := self.shared.get(self.state)) is None:
            if (found := self.long_tokens() if self.is_long else None) is not None:
                return found[:most]
            if self.is_watched or (self.is_large and self.ahead is None):
                return []
            with self.timed():
                known = self._keep(list(self.matcher.compute_ff_tokens()), is_long=False)
        return known.tokens[:most]

    def long_tokens(self) -> list[int] | None:
        """The next tokens of a text that must come; None if it is short, or none must come."""
        if (known := self.shared.get(self.state)) is None:
            found = self._long_tokens()
            self.is_long = found is not None
            return None if found is None else self._keep(found, is_long=True).tokens
        self.is_long = known.is_long
        return known.tokens if known.is_long else None

    def _long_tokens(self) -> list[int] | None:
        return None if self.long_text is None else self.long_text.tokens(self.matcher, self.last)

    def _keep(self, tokens: list[int], *, is_long: bool) -> Forced:
        if len(self.shared) >= MAX_SHARED:
            self.shared.clear()
        self.shared[self.state] = known = Forced(tokens, is_long)
        return known

    def fill_ahead(self, num_words: int) -> np.ndarray:
        """The mask of this state: [words] int32."""
        bits = np.zeros(num_words, np.int32)
        self.is_watched = False
        with self.timed():
            self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self.error:  # it would allow an end
            bits[:] = 0
        self.long_tokens()
        return bits

    def fill_long(self, bits: np.ndarray, drafts: Seq[int]) -> bool:
        """The masks of a text that must come, and is long, behind each of some drafts; False if it is not.

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
        """The first of some drafts, as far as the grammar allows them: none at the end of a thought, or behind it."""
        if self.thought is not None and self.thought.is_open:
            return self.thought.allowed(drafts)
        if not drafts or self.is_watched:
            return []
        with self.timed():
            return drafts[: self.matcher.validate_tokens(drafts)]
