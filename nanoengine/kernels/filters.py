"""top_k, top_p and min_p: the tokens that they keep, found among the likeliest few instead of by sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanoengine.core.sampling import keep_probable

FIRST_TRY = 1024
"""Likeliest tokens that are looked at where top_k does not say how many there can be."""

NEXT_TRY = 16
"""How many times more, if those were not enough."""


def keep_likeliest(
    logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, log_sum_exp: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The tokens that the filters of each row keep: (logits, token ids), both [num_rows, count], likeliest first.

    Logits of tokens that are not kept are -inf. The likeliest token is always kept; of equal ones, the lower id comes first.

    Args:
        logits: [num_rows, vocab_size] float32.
        top_k: [num_rows] int32; 0 keeps all.
        top_p: [num_rows] float32; 1 keeps all.
        min_p: [num_rows] float32; 0 keeps all.
        log_sum_exp: ln(sum of exp(row)) of each row. How many tokens are looked at depends on all rows: for a row to keep the
            same beside any others, -inf at its end must change nothing.
    """
    vocab_size = logits.shape[-1]
    top_k = top_k.clamp(max=vocab_size)  # so that one more is a number too
    most = int(torch.where(top_k > 0, top_k + 1, FIRST_TRY).max())
    top_k = torch.where(top_k > 0, top_k, vocab_size)
    # Probabilities are shares of what top_k leaves: of all, where there is no top_k.
    total = log_sum_exp(logits) if (top_k >= vocab_size).any() else torch.zeros_like(top_p)

    count = min(vocab_size, most)
    while True:
        values, token_ids = _ordered(logits, count)
        rank = torch.arange(count, device=logits.device)
        values = values.masked_fill(rank >= top_k[:, None], -torch.inf)
        share = torch.where(top_k < vocab_size, log_sum_exp(values), total)
        kept = keep_probable(values, share, top_p, min_p)
        if count == vocab_size or _is_settled(kept, logits, token_ids):
            return kept, token_ids
        count = min(vocab_size, count * NEXT_TRY)


def _ordered(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of each row and their ids; equal ones by id."""
    if count == logits.shape[-1]:
        ordered = logits.sort(dim=-1, descending=True, stable=True)
        return ordered.values, ordered.indices
    token_ids = logits.topk(count).indices.sort(dim=-1).values
    ordered = logits.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True)
    return ordered.values, token_ids.gather(-1, ordered.indices)


def _is_settled(kept: Tensor, logits: Tensor, token_ids: Tensor) -> bool:
    """Whether a token that was not looked at could be kept: only one as likely as the last that was looked at, or less."""
    last = logits.gather(-1, token_ids[:, -1:])[:, 0]
    lowest = kept.masked_fill(kept == -torch.inf, torch.inf).amin(-1)
    return bool(((lowest > last) | (last == -torch.inf)).all())
