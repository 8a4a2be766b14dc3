"""TokenLogprobs: the log probabilities of one position, by token id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class TokenLogprob(NamedTuple):
    """The log probability of a token in the distribution of the model, and its rank (1 is the likeliest)."""

    logprob: float
    rank: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs(Mapping[int, TokenLogprob]):
    """Token id -> TokenLogprob at one position: the token of the sequence, then the requested number of likeliest ones.

    It is made for every position of a prompt, and few are ever read: entries are built when they are read.
    """

    token: int
    logprob: float
    rank: int
    top_ids: np.ndarray  # [count] int64
    top: np.ndarray  # [count] float32: their log probabilities, likeliest first

    def __getitem__(self, token: int) -> TokenLogprob:
        if token == self.token:
            return TokenLogprob(self.logprob, self.rank)
        try:
            index = self.top_ids.tolist().index(token)
        except ValueError:
            raise KeyError(token) from None
        return TokenLogprob(float(self.top[index]), index + 1)

    def __iter__(self) -> Iterator[int]:
        yield self.token
        for token in self.top_ids.tolist():
            if token != self.token:
                yield token

    def __len__(self) -> int:
        return len(self.top_ids) + (self.token not in self.top_ids.tolist())

    def __repr__(self) -> str:
        return repr(dict(self))
