"""min_p, top_k and top_p: the tokens that pass them, selected among the likeliest few instead of by sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nanoengine.core.sampling import FilteredLogits, drop_unlikely, keep_probable

FIRST_TRY = 1024
"""Likeliest tokens that are looked at where top_k does not say how many there can be."""

NEXT_TRY = 16
"""How many times more, if those were not enough."""


def filter_tokens(
    logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, log_sum_exp: Callable[[Tensor], Tensor]
) -> Iterator[FilteredLogits]:
    """The tokens that pass the filters of each row. Rows for which few tokens are enough come first, as one batch: the cost of a
    row depends on its filters.

    Logits of tokens that do not pass are -inf. The likeliest token always passes; of equal ones, the lower id comes first.

    Args:
        logits: [num_rows, vocab_size] float32.
        top_k: [num_rows] int32; 0 keeps all.
        top_p: [num_rows] float32; 1 keeps all.
        min_p: [num_rows] float32; 0 keeps all.
        log_sum_exp: ln(sum of exp(row)) of each row. How many tokens are looked at depends on the rows beside it: for a row to
            keep the same beside any others, -inf at its end must change nothing.
    """
    vocab_size, limits = logits.shape[-1], top_k.tolist()
    needed = {row: min(vocab_size, k + 1 if k > 0 else FIRST_TRY) for row, k in enumerate(limits)}
    top_k = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    most = FIRST_TRY
    while needed:
        rows = [row for row, count in needed.items() if count <= most]
        most = min(vocab_size, most * NEXT_TRY)
        if not rows:
            continue
        count, is_all = max(needed[row] for row in rows), len(rows) == len(logits)
        where = slice(None) if is_all else torch.tensor(rows, dtype=torch.int64, device=logits.device)
        rows_left, k_left, p_left = logits[where], top_k[where], min_p[where]
        values, token_ids = _ordered(rows_left, count)
        rank = torch.arange(count, dtype=torch.int64, device=logits.device)
        values = drop_unlikely(values, p_left).masked_fill(rank >= k_left[:, None], -torch.inf)
        # Probabilities are relative to the tokens that pass min_p and top_k: the rest of a row is read if some of it may pass.
        log_total, ends_here = log_sum_exp(values), values[:, -1] == -torch.inf
        if not ends_here.all():
            likely = drop_unlikely(rows_left, p_left) if p_left.any() else rows_left
            log_total = torch.where(ends_here, log_total, log_sum_exp(likely))
        passing = keep_probable(values, log_total, top_p[where])
        settled = [True] * len(rows) if count == vocab_size else _are_settled(passing, rows_left, token_ids).tolist()
        done = [row for row, is_settled in zip(rows, settled, strict=True) if is_settled]
        needed |= dict.fromkeys(rows, min(vocab_size, count * NEXT_TRY))
        for row in done:
            del needed[row]
        if len(done) == len(rows):
            yield where, passing, token_ids
        elif done:
            are_done = torch.tensor(settled, dtype=torch.bool, device=logits.device)
            finished = torch.tensor(done, dtype=torch.int64, device=logits.device)
            yield finished, passing[are_done], token_ids[are_done]


def _ordered(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of each row and their ids; equal ones by id."""
    if count == logits.shape[-1]:
        ordered = logits.sort(dim=-1, descending=True, stable=True)
        return ordered.values, ordered.indices
    token_ids = logits.topk(count).indices.sort(dim=-1).values
    ordered = logits.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True)
    return ordered.values, token_ids.gather(-1, ordered.indices)


def _are_settled(passing: Tensor, logits: Tensor, token_ids: Tensor) -> Tensor:
    """Whether no token of a row outside of these could pass: it is as likely as the last that was, or less. [n] bool"""
    last = logits.gather(-1, token_ids[:, -1:])[:, 0]
    lowest = passing.masked_fill(passing == -torch.inf, torch.inf).amin(-1)
    return (lowest > last) | (last == -torch.inf)
