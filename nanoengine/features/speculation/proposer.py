"""What speculation asks of those who guess the next tokens of sequences: n-grams, or others.

A guess changes no token: it is verified by sampling, and what was not sampled is dropped. Bad guesses cost time, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol


class SequenceProposer(Protocol):
    """Guesses the next tokens of one sequence."""

    def fork(self) -> SequenceProposer:
        """One for another completion of the same prompt. This one is not asked and is told nothing from now on, so the two may
        share what was learned from the prompt.
        """
        ...

    def propose(self, token_ids: Seq[int], most: int) -> Seq[int]:
        """The tokens that may follow, the next one first: at most `most`, and none where it knows of none.

        Args:
            token_ids: all tokens of the sequence so far, its prompt first. From call to call they only get longer. The list is
                the sequence's own and must not be changed.
        """
        ...


class Proposer(Protocol):
    """Makes a `SequenceProposer` for each request. Requests share nothing: otherwise the time that an answer takes would tell its
    reader what others were told.
    """

    def begin(self, prompt: Seq[int]) -> SequenceProposer:
        """Read the prompt of a request that begins; each of its completions gets a fork of the result."""
        ...
