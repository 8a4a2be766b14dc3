"""Sampler: logits to tokens, each row by its own SamplingParams, without waiting for the device.

The order is fixed: tokens banned by min_tokens, then what `Kernels.choose_tokens` does: temperature, filters, and the draw. Log
probabilities are the model's own, before all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanoengine.engine.messages import SampledBatch, SamplingRow
from nanoengine.errors import NotFiniteLogits
from nanoengine.kernels.interface import Kernels
from nanoengine.outputs import TokenLogprob, TokenLogprobs
from nanoengine.runner.rows import SamplingTable
from nanoengine.runner.stream import Stream, send


@dataclass
class Logprobs:
    """Of the rows that asked for them, on their way to the host."""

    rows: list[int]
    chosen: Tensor  # [n] float32: of the sampled tokens
    ranks: Tensor  # [n] int64: how many tokens are likelier, and one
    top: Tensor  # [n, most] float32, likeliest first
    top_ids: Tensor  # [n, most] int64


def is_plain(sampling: list[SamplingRow]) -> bool:
    """Whether nothing but tokens is wanted, and none is banned."""
    return not any(row.banned_token_ids or row.params.num_logprobs is not None for row in sampling)


class Sampler:
    """Chooses one token per row. It keeps no state but the kernels it uses."""

    def __init__(self, kernels: Kernels, stream: Stream):
        self.kernels = kernels
        self.stream = stream

    def sample(
        self, logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor, sampling: list[SamplingRow]
    ) -> tuple[Tensor, Logprobs | None]:
        """Sample every row.

        Args:
            logits: [n, vocab_size] float32; overwritten.
            table: how rows are sampled.
            rows: [n] int32, the row of the table for each row of logits.
            positions: [n] int32, where in its sequence each token will stand.
            sampling: the same as the rows of the table say, and the rest; empty if there is no rest.

        Returns:
            [n] int64 tokens, -1 where the logits are not finite; and log probabilities, if any row asks for them.
        """
        asking = [i for i, row in enumerate(sampling) if row.params.num_logprobs is not None]
        raw = logits[self._send(asking)] if asking else None
        banned = [(i, token) for i, row in enumerate(sampling) for token in row.banned_token_ids]
        if banned:
            i, tokens = self._send([number for pair in banned for number in pair]).view(-1, 2).unbind(1)
            logits[i, tokens] = -torch.inf
        chosen = self.kernels.choose_tokens(
            logits, table.temperature, table.top_k, table.top_p, table.min_p, table.seeds, rows, positions.long()
        )
        if raw is None:
            return chosen, None
        return chosen, self._logprobs(raw, chosen, asking, sampling)

    def _logprobs(self, raw: Tensor, chosen: Tensor, asking: list[int], sampling: list[SamplingRow]) -> Logprobs:
        logprobs = raw.log_softmax(dim=-1)
        of_chosen = logprobs.gather(-1, chosen[self._send(asking), None].clamp(min=0))
        most = max(sampling[i].params.num_logprobs or 0 for i in asking)
        top, top_ids = logprobs.topk(min(most, logprobs.shape[-1]))
        ranks = (logprobs > of_chosen).sum(-1) + 1
        return Logprobs(asking, *(_to_host(tensor) for tensor in (of_chosen[:, 0], ranks, top, top_ids)))

    def _send(self, numbers: list[int]) -> Tensor:
        return send(np.array(numbers, dtype=np.int64), self.stream)


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", non_blocking=True)


def read_samples(tokens: Tensor, logprobs: Logprobs | None, sampling: list[SamplingRow]) -> SampledBatch:
    """The message of what was sampled, when it has reached the host. Rows of NaN or infinite logits have no token."""
    token_ids = tokens[: len(sampling)].tolist()
    error = None
    if min(token_ids) < 0:
        bad = sum(token < 0 for token in token_ids)
        error = NotFiniteLogits(
            f"{bad} of {len(token_ids)} rows have no finite highest logit: broken weights, or a dtype too narrow for them"
        )
    if logprobs is None:
        return SampledBatch(token_ids, error=error)
    result: list[TokenLogprobs | None] = [None] * len(sampling)
    columns = (logprobs.chosen, logprobs.ranks, logprobs.top, logprobs.top_ids)
    for i, chosen, rank, top, top_ids in zip(logprobs.rows, *(column.tolist() for column in columns), strict=True):
        count = sampling[i].params.num_logprobs or 0
        entries = {token_ids[i]: TokenLogprob(chosen, rank)}
        for place, (token, logprob) in enumerate(zip(top_ids[:count], top[:count], strict=True), start=1):
            entries.setdefault(token, TokenLogprob(logprob, place))
        result[i] = entries
    return SampledBatch(token_ids, result, error=error)
