"""Protocols of proposers, which make drafts of the next tokens of sequences: n-grams, or others.

A draft changes no token: it is verified by sampling, and dropped if another token was sampled. Bad drafts only cost time.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol


class SequenceProposer(Protocol):
    """The proposer of one sequence."""

    def fork(self) -> SequenceProposer:
        """A proposer for another completion of the same prompt. This one is not called any more, so that both may use the same
        data of the prompt.
        """
        ...

    def propose(self, token_ids: Seq[int], most: int) -> Seq[int]:
        """Drafts, the next token first: at most `most`, or none.

        Args:
            token_ids: all tokens of the sequence so far, its prompt first. They only get longer from call to call. The list is
                that of the sequence and must not be changed.
        """
        ...


class Proposer(Protocol):
    """Makes a `SequenceProposer` for each request. Requests have no common data: otherwise the time of an answer would reveal the
    answers to others.
    """

    def begin(self, prompt: Seq[int]) -> SequenceProposer:
        """Read the prompt of a new request; each of its completions gets a fork of the result."""
        ...
