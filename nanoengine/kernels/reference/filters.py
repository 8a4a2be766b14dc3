"""min_p, top_k and top_p: the tokens that they keep, found among the likeliest few instead of by sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nanoengine.core.sampling import FilteredLogits, drop_unlikely, keep_probable

FIRST_TRY = 1024
"""Likeliest tokens that are looked at where top_k does not say how many there can be."""

NEXT_TRY = 16
"""How many times more, if those were not enough."""


def keep_likeliest(
    logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, log_sum_exp: Callable[[Tensor], Tensor]
) -> Iterator[FilteredLogits]:
    """The tokens that the filters of each row keep. Rows that few tokens are enough for come first, and together: what a row
    costs depends on its own filters.

    Logits of tokens that are not kept are -inf. The likeliest token is always kept; of equal ones, the lower id comes first.

    Args:
        logits: [num_rows, vocab_size] float32.
        top_k: [num_rows] int32; 0 keeps all.
        top_p: [num_rows] float32; 1 keeps all.
        min_p: [num_rows] float32; 0 keeps all.
        log_sum_exp: ln(sum of exp(row)) of each row. How many tokens are looked at depends on the rows beside it: for a row to
            keep the same beside any others, -inf at its end must change nothing.
    """
    vocab_size, asked = logits.shape[-1], top_k.tolist()
    needed = {row: min(vocab_size, k + 1 if k > 0 else FIRST_TRY) for row, k in enumerate(asked)}
    top_k = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    most = FIRST_TRY
    while needed:
        rows = [row for row, count in needed.items() if count <= most]
        most = min(vocab_size, most * NEXT_TRY)
        if not rows:
            continue
        count, is_all = max(needed[row] for row in rows), len(rows) == len(logits)
        where = slice(None) if is_all else torch.tensor(rows, dtype=torch.int64, device=logits.device)
        own, own_k, own_p = logits[where], top_k[where], min_p[where]
        values, token_ids = _ordered(own, count)
        rank = torch.arange(count, dtype=torch.int64, device=logits.device)
        values = drop_unlikely(values, own_p).masked_fill(rank >= own_k[:, None], -torch.inf)
        # Probabilities are shares of what min_p and top_k leave: the rest of a row is looked at if it may be among that.
        share, ends_here = log_sum_exp(values), values[:, -1] == -torch.inf
        if not ends_here.all():
            share = torch.where(ends_here, share, log_sum_exp(drop_unlikely(own, own_p) if own_p.any() else own))
        kept = keep_probable(values, share, top_p[where])
        settled = [True] * len(rows) if count == vocab_size else _are_settled(kept, own, token_ids).tolist()
        done = [row for row, is_settled in zip(rows, settled, strict=True) if is_settled]
        needed |= dict.fromkeys(rows, min(vocab_size, count * NEXT_TRY))
        for row in done:
            del needed[row]
        if len(done) == len(rows):
            yield where, kept, token_ids
        elif done:
            are_done = torch.tensor(settled, dtype=torch.bool, device=logits.device)
            places = torch.tensor(done, dtype=torch.int64, device=logits.device)
            yield places, kept[are_done], token_ids[are_done]


def _ordered(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of each row and their ids; equal ones by id."""
    if count == logits.shape[-1]:
        ordered = logits.sort(dim=-1, descending=True, stable=True)
        return ordered.values, ordered.indices
    token_ids = logits.topk(count).indices.sort(dim=-1).values
    ordered = logits.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True)
    return ordered.values, token_ids.gather(-1, ordered.indices)


def _are_settled(kept: Tensor, logits: Tensor, token_ids: Tensor) -> Tensor:
    """Whether no token of a row that was not looked at could be kept: it is as likely as the last that was, or less. [n] bool"""
    last = logits.gather(-1, token_ids[:, -1:])[:, 0]
    lowest = kept.masked_fill(kept == -torch.inf, torch.inf).amin(-1)
    return (lowest > last) | (last == -torch.inf)
