"""Which tokens of a SentencePiece vocabulary merge into others: GGUF files have the scores of tokens, and no list of merges.

A token of n characters can be cut in n - 1 ways: some two million for a large vocabulary. One cumulative sum over the characters
gives the hashes of all parts, so that arrays are compared, and few strings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Positions = NDArray[np.int64]

BASE = 0x9E3779B97F4A7C15
INVERSE = pow(BASE, -1, 1 << 64)
"""The hash of characters c is the sum of (c[i] + 1) * BASE**i, modulo 2**64. That two parts with one hash differ happens in one
of some 10**7 vocabularies: `tokenizers` then refuses a pair that makes no token.
"""

BATCH = 1 << 15
"""Characters of tokens that are looked at together: some 200 bytes for each."""


class _Characters(NamedTuple):
    """The characters of some tokens, one token behind the other."""

    sums: Hashes  # of (c[i] + 1) * BASE**i over the first 0, 1, 2, ... characters
    inverses: Hashes  # of BASE**i
    starts: Positions  # where each token begins
    ends: Positions

    @staticmethod
    def of(tokens: Sequence[str]) -> _Characters:
        text = (
            np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64) + 1
        )  # each counts, also 0
        sums = np.zeros(len(text) + 1, np.uint64)
        np.cumsum(text * _powers(BASE, len(text)), out=sums[1:])
        ends = np.cumsum(np.fromiter(map(len, tokens), np.int64, len(tokens)))
        return _Characters(sums, _powers(INVERSE, len(sums)), np.concatenate((np.zeros(1, np.int64), ends[:-1])), ends)

    def hashes(self, first: Positions, end: Positions) -> Hashes:
        """Of the characters [first, end)."""
        return (self.sums[end] - self.sums[first]) * self.inverses[first]


class _Index:
    """The hashes of all tokens, in ascending order."""

    def __init__(self, hashes: Hashes):
        self._order = np.argsort(hashes)
        self._hashes = hashes[self._order]

    def find(self, wanted: Hashes) -> Positions:
        """Which token has each hash; -1: none has. In the order of their hashes they are found several times as fast."""
        order = np.argsort(wanted)
        wanted = wanted[order]
        positions = np.searchsorted(self._hashes, wanted)
        positions[positions == len(self._hashes)] = 0
        result = np.empty(len(wanted), np.int64)
        result[order] = np.where(self._hashes[positions] == wanted, self._order[positions], -1)
        return result


def find_merges(tokens: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """All pairs of tokens that together are a token, in the order of the latter, and of the cut in it: lists of some of them.

    Args:
        tokens: different ones, none of them empty.
    """
    batches = list(_batches(tokens))
    index = _Index(np.concatenate([some.hashes(some.starts, some.ends) for some in map(_Characters.of, batches)]))
    for batch in batches:
        characters = _Characters.of(batch)
        cut = np.setdiff1d(np.arange(characters.ends[-1]), characters.starts, assume_unique=True)
        token = np.searchsorted(characters.starts, cut) - 1
        left = index.find(characters.hashes(characters.starts[token], cut))
        token, cut, left = (some[left >= 0] for some in (token, cut, left))
        right = index.find(characters.hashes(cut, characters.ends[token]))
        firsts, seconds = (some[right >= 0].tolist() for some in (left, right))
        yield list(zip([tokens[i] for i in firsts], [tokens[i] for i in seconds], strict=True))


def _batches(tokens: Sequence[str]) -> Iterator[Sequence[str]]:
    first = size = 0
    for end, token in enumerate(tokens, 1):
        size += len(token)
        if size > BATCH or end == len(tokens):
            yield tokens[first:end]
            first, size = end, 0


def _powers(base: int, count: int) -> Hashes:
    """base**0, base**1, ..., modulo 2**64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers)
