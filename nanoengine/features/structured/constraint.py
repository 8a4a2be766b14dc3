"""Constraint: what a grammar says of one completion."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from time import thread_time

from llguidance import LLMatcher

from nanoengine.thought import ThoughtReader

SLOW = 0.05
"""Seconds of a CPU: hardly any text takes as much for a token, and all others of the step wait for it."""

MAX_SLOW_SECONDS = 0.5
"""That one text may take beyond `SLOW` for each of its tokens, all in all."""


class Constraint:
    """The state of a grammar behind the tokens that are known. One thread at a time may use it.

    Args:
        matcher: behind the empty text.
        thought: that comes first, and is read before this is: the grammar holds from the answer on. None: from the beginning.
    """

    def __init__(self, matcher: LLMatcher, thought: ThoughtReader | None = None):
        self.matcher, self.thought = matcher, thought
        self.num_read = 0  # tokens of the output
        self.is_watched = False  # it may be slow: its masks are filled alone
        self.slow_seconds = 0.0

    def read(self, tokens: Seq[int]) -> None:
        """These tokens of the output come next."""
        start = 0 if self.thought is None else self.thought.answer_start
        self.num_read += len(tokens)
        if start is not None and start < self.num_read:
            with self.timed():
                self.matcher.consume_tokens(list(tokens[max(0, start - self.num_read + len(tokens)) :]))

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
        self.is_watched = seconds > SLOW
        self.slow_seconds += max(0.0, seconds - SLOW)

    @property
    def error(self) -> str:
        """Why the grammar cannot go on: it was too much for its limits; "" if it can."""
        if self.slow_seconds > MAX_SLOW_SECONDS:
            return f"the grammar takes more than {SLOW:g} s for a token, again and again: make it simpler"
        return str(self.matcher.get_error())

    def forced(self, most: int) -> list[int]:
        """The next tokens, as far as there is no choice: what the tokenizer would make of the text that must come."""
        if not self.holds:
            return [] if self.thought is None else self.thought.forced(most)
        if self.also or self.is_watched:
            return []
        with self.timed():
            return list(self.matcher.compute_ff_tokens()[:most])

    def allowed(self, drafts: list[int]) -> list[int]:
        """The first of some drafts, as far as the grammar allows them: none at the end of a thought, or behind it."""
        if self.thought is not None and self.thought.is_open:
            return self.thought.allowed(drafts)
        if not drafts or self.is_watched:
            return []
        with self.timed():
            return drafts[: self.matcher.validate_tokens(drafts)]
