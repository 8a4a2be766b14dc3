"""Log probabilities: of the tokens that stand at some positions, and of the likeliest ones there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.outputs import TokenLogprob, TokenLogprobs
from nanoengine.runner.row_rules import row_slices


@dataclass
class Logprobs:
    """Of n positions, on their way to the host."""

    own: Tensor  # [n] float32, of the tokens that stand there
    ranks: Tensor  # [n] int64: how many tokens are likelier, and one
    top: Tensor  # [n, most] float32, likeliest first
    top_ids: Tensor  # [n, most] int64

    def read(self, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
        """The entries of each position, when they have reached the host.

        Args:
            token_ids: the tokens that stand there.
            counts: how many of the likeliest ones are wanted.
        """
        columns = (column.tolist() for column in (self.own, self.ranks, self.top, self.top_ids))
        entries = []
        for token, count, own, rank, top, top_ids in zip(token_ids, counts, *columns, strict=True):
            entry = {token: TokenLogprob(own, rank)}
            for place, (likely, logprob) in enumerate(zip(top_ids[:count], top[:count], strict=True), start=1):
                entry.setdefault(likely, TokenLogprob(logprob, place))
            entries.append(entry)
        return entries


def compute_logprobs(logits_of: Callable[[slice], Tensor], token_ids: Tensor, most: int) -> Logprobs:
    """Log probabilities in softmax(logits), computed for a bounded number of positions at a time.

    Args:
        logits_of: [m, vocab_size] float32 logits of m of the positions.
        token_ids: [n] int64, the tokens that stand there; negative where there is none, and what comes of it is of no use.
        most: how many of the likeliest tokens; all, if there are no more.
    """
    parts = []
    for part in row_slices(len(token_ids)):
        logits = logits_of(part)
        own_ids = token_ids[part, None].clamp(min=0)
        ranks = (logits > logits.gather(-1, own_ids)).sum(-1) + 1
        logprobs = logits.log_softmax(dim=-1)
        top, top_ids = logprobs.topk(min(most, logits.shape[-1]))
        parts.append((logprobs.gather(-1, own_ids)[:, 0], ranks, top, top_ids))
    return Logprobs(*(torch.cat(column).to("cpu", non_blocking=True) for column in zip(*parts, strict=True)))
