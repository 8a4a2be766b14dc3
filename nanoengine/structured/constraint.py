"""Constraint: what a grammar says of one completion."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from llguidance import LLMatcher


class Constraint:
    """The state of a grammar behind the tokens that are known. One thread at a time may use it.

    Args:
        matcher: behind the empty text.
        behind: tokens that end what a model thinks before it answers: the grammar holds behind them. Empty: from the beginning.
    """

    def __init__(self, matcher: LLMatcher, behind: Seq[int] = ()):
        self.matcher, self.behind = matcher, list(behind)
        self.num_read = 0  # tokens of the output
        self.is_open = not behind
        self._tail: list[int] = []  # the last tokens before it holds

    def read(self, tokens: Seq[int]) -> None:
        """These tokens of the output come next."""
        for place, token in enumerate(tokens):
            if self.is_open:
                self.matcher.consume_tokens(list(tokens[place:]))
                break
            self._tail = [*self._tail, token][-len(self.behind) :]
            self.is_open = self._tail == self.behind
        self.num_read += len(tokens)

    @property
    def error(self) -> str:
        """Why the grammar cannot go on: it was too much for its limits; "" if it can."""
        return str(self.matcher.get_error())

    def forced(self, most: int) -> list[int]:
        """The next tokens, as far as there is no choice: what the tokenizer would make of the text that must come."""
        return list(self.matcher.compute_ff_tokens()[:most]) if self.is_open else []

    def allowed(self, drafts: list[int]) -> list[int]:
        """The first of some drafts, as far as the grammar allows them."""
        return drafts[: self.matcher.validate_tokens(drafts)] if self.is_open and drafts else drafts
