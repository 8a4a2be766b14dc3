"""Log probabilities as callers get them: those of one position, by token id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class TokenLogprob(NamedTuple):
    """Log probability of one token in the model's own distribution, and its rank there (1 is the likeliest)."""

    logprob: float
    rank: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs(Mapping[int, TokenLogprob]):
    """Token id -> TokenLogprob at one position: the token that stands there, then the likeliest ones that were asked for.

    It is made for every position of a prompt, and few are ever read: what a dict would hold is built when it is asked for.
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
            place = self.top_ids.tolist().index(token)
        except ValueError:
            raise KeyError(token) from None
        return TokenLogprob(float(self.top[place]), place + 1)

    def __iter__(self) -> Iterator[int]:
        yield self.token
        for token in self.top_ids.tolist():
            if token != self.token:
                yield token

    def __len__(self) -> int:
        return len(self.top_ids) + (self.token not in self.top_ids.tolist())

    def __repr__(self) -> str:
        return repr(dict(self))
