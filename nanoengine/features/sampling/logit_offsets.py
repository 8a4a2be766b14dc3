"""LogitOffsets: numbers that are added to logits: logit_bias, and -inf for tokens that would end a sequence before min_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from nanoengine.core.device import Device
from nanoengine.core.messages import Started
from nanoengine.features.sampling.row_processor import RowProcessor, with_params


class Offsets(NamedTuple):
    """Offsets of the logits of a row."""

    tokens: np.ndarray  # [n] int64
    values: np.ndarray  # [n] float32


class LogitOffsets(RowProcessor[Offsets]):
    """Adds the offsets of rows to logits. They depend on positions alone."""

    def pack(self, numbers: np.ndarray, pieces: list[Offsets]) -> Sequence[np.ndarray]:
        """Sample, token and value of each offset."""
        tokens, values = (np.concatenate(column) for column in zip(*pieces, strict=True))
        return np.repeat(numbers, [len(piece.tokens) for piece in pieces]), tokens, values

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Any) -> None:
        samples, tokens, values = self.send(numbers, rows)
        logits.index_put_((samples, tokens), values, accumulate=True)


class LogitBias(LogitOffsets):
    """params.logit_bias."""

    forbids = False

    def start(self, started: Sequence[Started]) -> None:
        for start, params in with_params(started):
            if params.logit_bias:
                tokens, values = zip(*params.logit_bias, strict=True)
                self.put(start.row, Offsets(np.array(tokens, dtype=np.int64), np.array(values, dtype=np.float32)))


class MinTokensBan(LogitOffsets):
    """-inf for tokens that end the sequence, while its output is shorter than params.min_tokens."""

    def __init__(self, num_rows: int, vocab_size: int, device: Device):
        super().__init__(num_rows, device)
        self.vocab_size = vocab_size  # an end of text that is not below it is never sampled anyway

    def start(self, started: Sequence[Started]) -> None:
        for start, params in with_params(started):
            stops = [token for token in start.sampling.stop_token_ids if token < self.vocab_size]
            if params.min_tokens and stops:
                values = np.full(len(stops), -np.inf, dtype=np.float32)
                until = start.sampling.num_prompt_tokens + params.min_tokens
                self.put(start.row, Offsets(np.array(stops, dtype=np.int64), values), until)
