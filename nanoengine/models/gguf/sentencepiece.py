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
Places = NDArray[np.int64]

BASE = 0x9E3779B97F4A7C15
INVERSE = pow(BASE, -1, 1 << 64)
"""The hash of characters c is the sum of (c[i] + 1) * BASE**i, modulo 2**64. That two parts with one hash differ happens in one
of some 10**7 vocabularies: `tokenizers` then refuses a pair that makes no token.
"""

BATCH = 1 << 12
"""Tokens whose characters are looked at together."""


class _Characters(NamedTuple):
    """Of some tokens, one behind the other."""

    sums: Hashes  # of (c[i] + 1) * BASE**i over the first 0, 1, 2, ... characters
    inverses: Hashes  # of BASE**i
    starts: Places  # where each token begins
    ends: Places

    @staticmethod
    def of(tokens: Sequence[str]) -> _Characters:
        text = np.frombuffer("".join(tokens).encode("utf-32-le"), "<u4").astype(np.uint64) + 1  # each counts, also 0
        sums = np.zeros(len(text) + 1, np.uint64)
        np.cumsum(text * _powers(BASE, len(text)), out=sums[1:])
        ends = np.cumsum(np.fromiter(map(len, tokens), np.int64, len(tokens)))
        return _Characters(sums, _powers(INVERSE, len(sums)), np.concatenate((np.zeros(1, np.int64), ends[:-1])), ends)

    def hashes(self, first: Places, end: Places) -> Hashes:
        """Of the characters [first, end)."""
        return (self.sums[end] - self.sums[first]) * self.inverses[first]


class _Index:
    """Finds tokens by their hashes."""

    def __init__(self, hashes: Hashes):
        self._order = np.argsort(hashes)
        self._hashes = hashes[self._order]

    def find(self, wanted: Hashes) -> Places:
        """Which token has each hash; -1: none has. In the order of their hashes they are found several times as fast."""
        order = np.argsort(wanted)
        wanted = wanted[order]
        places = np.searchsorted(self._hashes, wanted)
        places[places == len(self._hashes)] = 0
        found = np.empty(len(wanted), np.int64)
        found[order] = np.where(self._hashes[places] == wanted, self._order[places], -1)
        return found


def find_merges(tokens: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """All pairs of tokens that together are a token, in the order of the latter, and of the cut in it: lists of some of them.

    Args:
        tokens: different ones, none of them empty.
    """
    batches = [tokens[first : first + BATCH] for first in range(0, len(tokens), BATCH)]
    index = _Index(np.concatenate([own.hashes(own.starts, own.ends) for own in map(_Characters.of, batches)]))
    for batch in batches:
        own = _Characters.of(batch)
        cut = np.setdiff1d(np.arange(own.ends[-1]), own.starts, assume_unique=True)
        token = np.searchsorted(own.starts, cut) - 1
        left = index.find(own.hashes(own.starts[token], cut))
        token, cut, left = (some[left >= 0] for some in (token, cut, left))
        right = index.find(own.hashes(cut, own.ends[token]))
        firsts, seconds = (some[right >= 0].tolist() for some in (left, right))
        yield list(zip([tokens[i] for i in firsts], [tokens[i] for i in seconds], strict=True))


def _powers(base: int, count: int) -> Hashes:
    """base**0, base**1, ..., modulo 2**64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers)
