"""Numbers that are added to single logits: logit_bias, and -inf for what would end a sequence before min_tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from nanoengine.engine.messages import RowSampling, Started
from nanoengine.runner.drafts import Drafts, Verified
from nanoengine.runner.row_rules import FOREVER, RowPieces
from nanoengine.runner.stream import Stream


class Offsets(NamedTuple):
    """What is added to the logits of a row."""

    tokens: np.ndarray  # [n] int64
    values: np.ndarray  # [n] float32
    until: int = FOREVER  # for tokens at positions below it


def logit_bias(sampling: RowSampling) -> Offsets | None:
    """params.logit_bias."""
    if not sampling.params.logit_bias:
        return None
    tokens, values = zip(*sampling.params.logit_bias, strict=True)
    return Offsets(np.array(tokens, dtype=np.int64), np.array(values, dtype=np.float32))


def min_tokens_ban(sampling: RowSampling) -> Offsets | None:
    """-inf for all that ends the sequence, as long as its output is shorter than params.min_tokens."""
    if not sampling.params.min_tokens or not sampling.stop_token_ids:
        return None
    tokens = np.array(sampling.stop_token_ids, dtype=np.int64)
    values = np.full(len(tokens), -np.inf, dtype=np.float32)
    return Offsets(tokens, values, sampling.num_prompt_tokens + sampling.params.min_tokens)


class LogitOffsets:
    """The rule that adds them.

    Args:
        num_rows: rows are below it.
        vocab_size: tokens that are not below it are never sampled anyway.
        stream: of the logits.
        of: the offsets of a row, if it has any.
    """

    def __init__(self, num_rows: int, vocab_size: int, stream: Stream, of: Callable[[RowSampling], Offsets | None]):
        self.vocab_size = vocab_size
        self._of = of
        self._pieces = RowPieces[Offsets](num_rows, stream, _pack)
        self.find = self._pieces.find

    def start(self, started: Sequence[Started]) -> None:
        for row in started:
            offsets = self._of(row.sampling)
            if offsets is not None:
                known = offsets.tokens < self.vocab_size
                piece = Offsets(offsets.tokens[known], offsets.values[known])
                self._pieces.put(row.row, piece, offsets.until)

    def end(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._pieces.drop(row)

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Drafts | None) -> None:
        samples, tokens, values = self._pieces.send(numbers, rows)
        logits.index_put_((samples, tokens), values, accumulate=True)

    def observe(self, tokens: Tensor, numbers: np.ndarray, rows: np.ndarray, verified: Verified | None) -> None:
        """It depends on positions only."""


def _pack(numbers: np.ndarray, pieces: list[Offsets]) -> Sequence[np.ndarray]:
    """Sample, token and value of each offset."""
    counts = [len(piece.tokens) for piece in pieces]
    tokens, values = (np.concatenate([piece[i] for piece in pieces]) for i in (0, 1))
    return np.repeat(numbers, counts), tokens, values
