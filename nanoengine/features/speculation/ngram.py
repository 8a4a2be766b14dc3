"""Prompt lookup: a text that repeats itself goes on as it went on before."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

TOKEN_BITS = 32

MOST_PLACES = 16
"""Occurrences of the last tokens that are compared, the latest first."""

MOST_COMMON = 32
"""Tokens before a place that are compared with the end of the text."""


class NgramProposer:
    """Guesses what followed the last tokens of a sequence earlier in its prompt or output.

    Sequences share nothing. An index takes about 0.2 KB for each token of a sequence that is still running.

    Args:
        size: tokens that an occurrence has in common with the end; 1 guesses at every word that was seen before.

    Source: prompt lookup decoding (Saxena, 2023), https://github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(self, size: int = 2):
        self._size = size

    def begin(self, prompt: Seq[int]) -> NgramSequenceProposer:
        proposer = NgramSequenceProposer(self._size)
        proposer.read(prompt)
        return proposer


class NgramSequenceProposer:
    """Knows for each place in a text the latest earlier place behind the same n-gram.

    The guess is what stands at the place that has the most in common with the end, of the latest ones behind its n-gram. It has
    at most as many tokens as are in common: two may be chance, but a copy soon has many.
    """

    __slots__ = ("_earlier", "_gram", "_latest", "_mask", "_of_prompt", "_size")

    def __init__(self, size: int):
        self._size, self._mask = size, (1 << size * TOKEN_BITS) - 1
        self._gram = self._mask  # the last tokens in one integer: tuples would keep the garbage collector busy
        self._latest: dict[int, int] = {}  # n-gram -> the place behind its latest occurrence
        self._of_prompt: Mapping[int, int] = {}  # the same, of a prompt that other completions have too
        self._earlier = [0]  # of each place that was read; 0: there is none

    def fork(self) -> NgramSequenceProposer:
        fork = NgramSequenceProposer(self._size)
        fork._of_prompt, fork._earlier, fork._gram = self._latest, self._earlier.copy(), self._gram
        return fork

    def read(self, token_ids: Seq[int]) -> None:
        """Take note of the tokens that came since the last call."""
        latest, of_prompt, earlier, gram, mask = self._latest, self._of_prompt, self._earlier, self._gram, self._mask
        for place, token in enumerate(token_ids[len(earlier) - 1 :], len(earlier)):
            gram = gram << TOKEN_BITS & mask | token
            earlier.append(latest.get(gram) or of_prompt.get(gram, 0))
            latest[gram] = place
        self._gram = gram

    def propose(self, token_ids: Seq[int], most: int) -> list[int]:
        self.read(token_ids)
        source, num_common = self._source(token_ids)
        most = min(most, num_common)
        if most <= 0:
            return []
        guess = list(token_ids[source : source + most])
        if len(guess) < most:  # a loop: what follows is once more what has just been guessed
            guess = (guess * (most // len(guess) + 1))[:most]
        return guess

    def _source(self, token_ids: Seq[int]) -> tuple[int, int]:
        """The place to copy from, and how many tokens before it are those of the end; 0: there is no place."""
        place = end = len(token_ids)
        source = num_common = 0
        for _ in range(MOST_PLACES):
            place = self._earlier[place]
            if not place or num_common == MOST_COMMON:
                break
            count, most = self._size, min(place, MOST_COMMON)
            while count < most and token_ids[place - count - 1] == token_ids[end - count - 1]:
                count += 1
            if count > num_common:
                source, num_common = place, count
        return source, num_common
