"""Merges of a SentencePiece vocabulary: GGUF files store the scores of its tokens, and no list of merges.

Of all pairs of tokens that make one token, BPE uses one at most. A merge depends only on the characters that it merges, so each
token has one last merge: that of the token as a text by itself. A pair is dropped if an earlier merge crosses its cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nanoengine.errors import UnsupportedModel
from nanoengine.models.gguf.token_hashes import Index, Numbers, TokensOfLength, batches_by_length

MAX_MERGES = 4_000_000
"""Pairs of tokens; those of the largest vocabularies have a quarter of it."""

CHARACTER = -1


class _Derivations:
    """The merges by which BPE makes each token of a vocabulary, from the shortest to the longest.

    The merge of a token is known if one pair remains, and if both parts are made earlier, as in every trained vocabulary. A token
    without a known merge retains all its pairs, and so do the tokens that contain it.

    Args:
        index: of all tokens.
        count: number of tokens.
        symbols: characters whose tokens retain all their pairs: BPE may make them of other symbols than single characters.
    """

    def __init__(self, index: Index, count: int, symbols: Numbers):
        self._index, self._unknown, self._symbols = index, count, symbols
        self._made = np.full(count, count)  # rank of each token's merge, which is its position; `count`: not known
        self._size, self._first, self._second = np.zeros((3, count), np.int64)  # length of the first part; both parts

    def add(self, batch: TokensOfLength) -> tuple[Numbers, Numbers, Numbers]:
        """Positions of token, first part and second part of each merge into the tokens of a batch."""
        if batch.length == 1:
            self._made[batch.positions] = CHARACTER
        left = self._index.find(batch.starts[:, :-1])
        rows, cuts = np.nonzero(left >= 0)
        left, cuts = left[rows, cuts], cuts + 1
        right = self._index.find(batch.hashes(rows, cuts, np.full(len(rows), batch.length)))
        pairs = np.stack((rows, cuts, left, right))[:, right >= 0]
        is_certain = ~batch.contain(self._symbols)
        pairs = pairs[:, ~self._are_crossed(batch, pairs, is_certain[pairs[0]])]
        rows, _, left, right = pairs
        tokens = batch.positions[rows]
        is_known = (np.bincount(rows)[rows] == 1) & (self._made[pairs[2:]].max(0) < tokens) & is_certain[rows]
        known = tokens[is_known]
        self._made[known] = known
        self._size[known], self._first[known], self._second[known] = pairs[1:, is_known]
        return tokens, left, right

    def _are_crossed(self, batch: TokensOfLength, pairs: Numbers, is_certain: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether BPE cannot merge each pair [row, cut, first part, second part].

        Of the two tokens at the cut, the later one is replaced by its part at the cut, step by step. If both tokens at the cut
        merge into a token that is made earlier than the one that was replaced, BPE never makes the latter.
        """
        crossed, rows = np.zeros(pairs.shape[1], np.bool_), pairs[0]
        first, end = np.zeros_like(rows), np.full_like(rows, batch.length)
        state = np.stack((np.arange(len(rows)), *pairs[:2], first, end, *pairs[2:]))[:, is_certain]
        while state.size:
            made = self._made[state[5:]]
            last = made.max(0)
            has_others = np.bincount(rows[~crossed])[state[1]] > 1
            is_open = (last != CHARACTER) & (last != self._unknown) & has_others
            number, row, cut, first, end, left, right = state = state[:, is_open]
            last, is_left = last[is_open], (made[0] > made[1])[is_open]
            first[:] = np.where(is_left, first + self._size[left], first)
            end[:] = np.where(is_left, end, cut + self._size[right])
            left[:], right[:] = np.where(is_left, (self._second[left], right), (left, self._first[right]))
            token = self._index.find(batch.hashes(row, first, end))
            is_earlier = (token >= 0) & (token < last)
            crossed[number[is_earlier]] = True
            state = state[:, ~is_earlier]
        return crossed


def find_merges(tokens: Sequence[str], unk_token: str | None = None) -> list[tuple[str, str]]:
    """Pairs of tokens that merge into a token, but for those that BPE cannot use; in the order of these tokens, then of cuts.

    Args:
        tokens: different ones, none of them empty, in the order in which BPE merges their parts.
        unk_token: the token for unknown characters, if there is one.

    Raises:
        UnsupportedModel: more than MAX_MERGES pairs.
    """
    # For an unknown character BPE begins with tokens such as <0x0A>: those of several characters need no merge.
    symbols = np.array([*map(ord, "<" + (unk_token or "")[:1])])
    batches = list(batches_by_length(tokens))
    derivations, merges, count = _Derivations(Index(batches), len(tokens), symbols), list[Sequence[Numbers]](), 0
    for batch in batches:
        merges.append(derivations.add(batch))
        if (count := count + len(merges[-1][0])) > MAX_MERGES:
            ways = f"tokenizer.ggml.tokens can be merged from one another in more than {MAX_MERGES} ways, the limit"
            raise UnsupportedModel(f"{ways}: give the model's tokenizer.json with the option tokenizer")
    made, left, right = map(np.concatenate, zip(*merges, strict=True))
    order = np.argsort(made, kind="stable")
    parts = (map(tokens.__getitem__, positions[order].tolist()) for positions in (left, right))
    return list(zip(*parts, strict=True))
