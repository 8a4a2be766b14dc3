"""Prompt lookup: drafts are the tokens that followed an earlier occurrence of the last n-gram."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

TOKEN_BITS = 32

MAX_OCCURRENCES = 16
"""Occurrences of the last n-gram that are compared, the latest first."""

MAX_COMMON = 32
"""Tokens before an occurrence that are compared with the end of the text."""


class NgramProposer:
    """Proposes the tokens behind an earlier occurrence of a sequence's last n-gram in its prompt or output.

    Each sequence has an index, of about 0.2 KB for each of its tokens while it is running.

    Args:
        size: tokens of an n-gram; 1 makes drafts behind every repeated token.

    Source: prompt lookup decoding (Saxena, 2023), https://github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(self, size: int = 2):
        self._size = size

    def begin(self, prompt: Seq[int]) -> NgramSequenceProposer:
        proposer = NgramSequenceProposer(self._size)
        proposer.read(prompt)
        return proposer


class NgramSequenceProposer:
    """An index of n-grams: for each position of a text, the latest earlier position behind the same n-gram.

    Of the latest occurrences of the last n-gram, the one with the longest common suffix is copied. There are at most as many
    drafts as common tokens: two may be chance, but a copy soon has many.
    """

    __slots__ = ("_earlier", "_gram", "_latest", "_mask", "_of_prompt", "_size")

    def __init__(self, size: int):
        self._size, self._mask = size, (1 << size * TOKEN_BITS) - 1
        self._gram = self._mask  # the last tokens in one integer: tuples would keep the garbage collector busy
        self._latest: dict[int, int] = {}  # n-gram -> the position behind its latest occurrence
        self._of_prompt: Mapping[int, int] = {}  # the same for a prompt, common to all completions
        self._earlier = [0]  # for each position; 0: there is none

    def fork(self) -> NgramSequenceProposer:
        fork = NgramSequenceProposer(self._size)
        fork._of_prompt, fork._earlier, fork._gram = self._latest, self._earlier.copy(), self._gram
        return fork

    def read(self, token_ids: Seq[int]) -> None:
        """Add the tokens since the last call to the index."""
        latest, of_prompt, earlier, gram, mask = self._latest, self._of_prompt, self._earlier, self._gram, self._mask
        for position, token in enumerate(token_ids[len(earlier) - 1 :], len(earlier)):
            gram = gram << TOKEN_BITS & mask | token
            earlier.append(latest.get(gram) or of_prompt.get(gram, 0))
            latest[gram] = position
        self._gram = gram

    def propose(self, token_ids: Seq[int], most: int) -> list[int]:
        self.read(token_ids)
        source, num_common = self._source(token_ids)
        most = min(most, num_common)
        if most <= 0:
            return []
        guess = list(token_ids[source : source + most])
        if len(guess) < most:  # a loop: the drafts repeat themselves
            guess = (guess * (most // len(guess) + 1))[:most]
        return guess

    def _source(self, token_ids: Seq[int]) -> tuple[int, int]:
        """The position to copy from, and the number of tokens before it that are those of the end; 0: there is none."""
        position = end = len(token_ids)
        source = num_common = 0
        for _ in range(MAX_OCCURRENCES):
            position = self._earlier[position]
            if not position or num_common == MAX_COMMON:
                break
            count, most = self._size, min(position, MAX_COMMON)
            while count < most and token_ids[position - count - 1] == token_ids[end - count - 1]:
                count += 1
            if count > num_common:
                source, num_common = position, count
        return source, num_common
