"""What the engine asks of whoever guesses the next tokens of its sequences.

A guess changes no token: it is verified by sampling, and what was not sampled is dropped. Bad guesses cost time, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Guesser(Protocol):
    """Guesses the next tokens of one sequence."""

    def guess(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """The tokens that may follow, the next one first: at most `most`, and none where it knows of none.

        Args:
            token_ids: all tokens of the sequence so far, its prompt first. From call to call they only get longer; the list is
                the sequence's own, and must not be changed.
        """
        ...

    def end(self, token_ids: Sequence[int]) -> None:
        """The sequence has ended with these tokens. It is not asked again."""
        ...


class Proposer(Protocol):
    """Makes a guesser for each sequence; what they share is kept here."""

    def begin(self, num_prompt_tokens: int, cache_salt: bytes) -> Guesser:
        """For a sequence that begins.

        Args:
            num_prompt_tokens: of its tokens, the first ones, which were given and not sampled.
            cache_salt: what one sequence has said may help another only if both have the same: else times would tell of texts.
        """
        ...
