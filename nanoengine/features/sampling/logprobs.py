"""Log probabilities in the distribution of the model, before any processor: of tokens, and of the likeliest ones at their
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.messages import Started, StepResult
from nanoengine.core.sampler import Sampler
from nanoengine.features.sampling.collector import LOGPROBS
from nanoengine.features.sampling.row_processor import RowProcessor, row_slices, with_params
from nanoengine.features.sampling.token_logprobs import TokenLogprobs


@dataclass
class LogprobColumns:
    """Log probabilities at n positions, on their way to the host."""

    logprobs: Tensor  # [n] float32, of the tokens at these positions
    ranks: Tensor  # [n] int64: 1 + the number of likelier tokens
    top: Tensor  # [n, most] float32, likeliest first
    top_ids: Tensor  # [n, most] int64

    def entries(self, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
        """The entry of each position, once the columns have reached the host.

        Args:
            token_ids: the tokens at the positions.
            counts: for each position, the number of likeliest tokens.
        """
        columns = self.logprobs.tolist(), self.ranks.tolist(), self.top_ids.numpy(), self.top.numpy()
        return [  # copies: an entry that lives long must not hold the memory of all
            TokenLogprobs(token, logprob, rank, top_ids[:count].copy(), top[:count].copy())
            for token, count, logprob, rank, top_ids, top in zip(token_ids, counts, *columns, strict=True)
        ]


def compute_logprobs(logits_of: Callable[[slice], Tensor], token_ids: Tensor, most: int) -> LogprobColumns:
    """Log probabilities in softmax(logits), computed for a bounded number of positions at a time.

    Args:
        logits_of: returns the logits of m of the positions, [m, vocab_size] float32.
        token_ids: [n] int64, the tokens at the positions; for a negative one the result is undefined.
        most: the number of likeliest tokens, or the vocabulary if that is less.
    """
    parts = []
    for part in row_slices(len(token_ids)):
        logits = logits_of(part)
        ids = token_ids[part, None].clamp(min=0)
        ranks = (logits > logits.gather(-1, ids)).sum(-1) + 1
        logprobs = logits.log_softmax(dim=-1)
        top, top_ids = logprobs.topk(min(most, logits.shape[-1]))
        parts.append((logprobs.gather(-1, ids)[:, 0], ranks, top, top_ids))
    return LogprobColumns(*(torch.cat(column).to("cpu", non_blocking=True) for column in zip(*parts, strict=True)))


class SampleLogprobs(RowProcessor[int]):
    """Reports the log probabilities of samples. It changes no logits, and must be the first processor: it copies the logits where
    another processor may change them.

    Args:
        sampler: the sampler of this processor.
    """

    forbids = False

    def __init__(self, num_rows: int, sampler: Sampler):
        super().__init__(num_rows, sampler.device)
        self.sampler = sampler
        self._raw: Tensor | None = None

    def start(self, started: Sequence[Started]) -> None:
        for start, params in with_params(started):
            if params.num_logprobs is not None:
                self.put(start.row, params.num_logprobs)

    def pack(self, numbers: np.ndarray, pieces: list[int]) -> Sequence[np.ndarray]:
        return (numbers,)

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Any) -> None:
        [samples] = self.send(numbers, rows)
        others_change = any(other.pieces for other in self.sampler.processors if other is not self)
        self._raw = logits.index_select(0, samples) if others_change else None

    def observe(
        self, logits: Tensor, tokens: Tensor, numbers: np.ndarray, rows: np.ndarray, verified: Any
    ) -> Callable[[StepResult], None]:
        [samples] = self.send(numbers, rows)
        raw, self._raw = self._raw, None

        def logits_of(part: slice) -> Tensor:
            return logits.index_select(0, samples[part]) if raw is None else raw[part]

        counts = [self.pieces[row] for row in rows[numbers].tolist()]
        columns = compute_logprobs(logits_of, tokens.index_select(0, samples), max(counts))

        def read(result: StepResult) -> None:
            token_ids = [result.token_ids[number] for number in numbers.tolist()]
            entries = zip(numbers.tolist(), columns.entries(token_ids, counts), strict=True)
            result.extras[LOGPROBS] = {number: entry for number, entry in entries if entry.token >= 0}

        return read
