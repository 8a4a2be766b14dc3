"""Lookup of all parts of all tokens of a vocabulary: some two million in a large one.

Prefix sums of hashes (Karp and Rabin, 1987) make it a comparison of arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int64]

BASE = 0x9E3779B97F4A7C15
INVERSE = pow(BASE, -1, 1 << 64)
"""The hash of characters c is the sum of (c[i] + 1) * BASE**i, modulo 2**64. Two tokens of one hash are in one of some 10**7
vocabularies: `tokenizers` then refuses a pair that makes no token.
"""

BATCH = 1 << 15
"""Characters of the tokens of a batch: some 200 bytes of arrays for each."""


class TokensOfLength:
    """Some tokens of one length, and the hashes of their parts.

    Attributes:
        positions: [tokens] in the vocabulary, ascending.
        length: characters of each.
        starts: [tokens, length] hashes of the first 1, 2, ... characters.
    """

    def __init__(self, characters: NDArray[np.uint32], positions: Numbers):
        self.positions, self.length, self._characters = positions, characters.shape[1], characters
        terms = (characters.astype(np.uint64) + np.uint64(1)) * _powers(BASE, self.length)  # 0 counts, too
        self._sums = np.pad(np.cumsum(terms, 1), ((0, 0), (1, 0)))
        self._inverses = _powers(INVERSE, self.length + 1)
        self.starts = self._sums[:, 1:]

    def hashes(self, rows: Numbers, first: Numbers, end: Numbers) -> Hashes:
        """Of the characters [first, end) of the tokens in some rows."""
        return (self._sums[rows, end] - self._sums[rows, first]) * self._inverses[first]

    def contain(self, characters: Numbers) -> NDArray[np.bool_]:
        """Whether each token has one of some characters."""
        return np.asarray(np.isin(self._characters, characters).any(1))


def batches_by_length(tokens: Sequence[str]) -> Iterator[TokensOfLength]:
    """All tokens, none of them empty, from the shortest to the longest; tokens of equal length stay in their order."""
    characters = np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), "<u4")
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    starts, order = np.cumsum(lengths) - lengths, np.argsort(lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    for length, group in zip(distinct.tolist(), np.split(order, np.cumsum(counts)[:-1]), strict=True):
        step = max(1, BATCH // length)
        for positions in (group[i : i + step] for i in range(0, len(group), step)):
            yield TokensOfLength(characters[starts[positions, None] + np.arange(length)], positions)


class Index:
    """Positions of tokens by their hashes, which are sorted."""

    def __init__(self, batches: Sequence[TokensOfLength]):
        hashes = np.empty(sum(len(batch.positions) for batch in batches), np.uint64)
        for batch in batches:
            hashes[batch.positions] = batch.starts[:, -1]
        self._positions = np.argsort(hashes)
        self._hashes = hashes[self._positions]

    def find(self, wanted: Hashes) -> Numbers:
        """The position of the token of each hash; -1: there is none."""
        # In ascending order, for which a binary search takes half of the time.
        order = np.argsort(wanted, axis=None)
        slots = np.empty(wanted.size, np.int64)
        slots[order] = np.searchsorted(self._hashes, wanted.ravel()[order])
        slots = slots.clip(max=len(self._hashes) - 1)
        return np.where(self._hashes[slots] == wanted.ravel(), self._positions[slots], -1).reshape(wanted.shape)


def _powers(base: int, count: int) -> Hashes:
    """base**0, base**1, ..., modulo 2**64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers)
