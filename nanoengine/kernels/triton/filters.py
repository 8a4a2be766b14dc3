"""What top_k, top_p and min_p keep, without sorting: a program for each row searches for the lowest logit that its filters keep,
as in FlashInfer (Ye et al., 2025).

A row's limits depend neither on the other rows nor on the device: only sums of probabilities are rounded, always in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels import sampling
from nanoengine.kernels.sampling import SamplingTable
from nanoengine.kernels.triton.launch import Launch

TILE = 8192
"""Logits that are looked at together: one row is work for one multiprocessor, so many must be on their way at once."""

NUM_WARPS = 16

LEAST_TEMPERATURE = tl.constexpr(sampling.LEAST_TEMPERATURE)


@triton.jit
def load_logits(row: tl.tensor, token: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    """Logits of a row; -inf beyond its end, and inf for NaN: both mean that the row has no finite highest logit."""
    x = tl.load(row + token, mask=token < vocab_size, other=-float("inf"))
    return tl.where(x == x, x, float("inf"))


@triton.jit
def _tile(TILE: tl.constexpr) -> tl.tensor:
    """Offsets of a tile as [4, TILE / 4]: wide enough for all threads, so that a column is reduced by one of them alone."""
    return tl.arange(0, 4)[:, None] * (TILE // 4) + tl.arange(0, TILE // 4)[None, :]


@triton.jit
def _weight(x: tl.tensor, highest: tl.tensor, inverse: tl.tensor, BY_MASS: tl.constexpr) -> tl.tensor:
    """What a token counts in a search: its probability, relative to the likeliest one's, or 1."""
    return tl.exp((x - highest) * inverse) if BY_MASS else tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _pivot(low: tl.tensor, high: tl.tensor, share: tl.constexpr) -> tl.tensor:
    """A value in [low, high), low < high."""
    pivot = tl.maximum(low * (1 - share) + high * share, low)
    return tl.where(pivot < high, pivot, low)


@triton.jit
def _narrow(
    low: tl.tensor,
    high: tl.tensor,
    above: tl.tensor,
    weight: tl.tensor,
    below: tl.tensor,
    over: tl.tensor,
    limit: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A bracket, after a look at a pivot inside: the weight above it, the next logit below (or there) and the next above."""
    enough = weight < limit
    lower = enough & (below < high)
    return tl.where(enough, low, tl.maximum(low, over)), tl.where(lower, below, high), tl.where(lower, weight, above)


@triton.jit
def _lowest_kept(
    row: tl.tensor,
    vocab_size: tl.tensor,
    low: tl.tensor,
    highest: tl.tensor,
    inverse: tl.tensor,
    limit: tl.tensor,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The lowest logit, `low` or above, such that those above it weigh less than `limit`, and what they weigh.

    low and high are logits at all times, the answer is one of [low, high], and each pass takes one of these away at least.
    """
    high, above = highest, tl.full([], 0.0, tl.float32)
    while low < high:
        pivot_1, pivot_2 = _pivot(low, high, 1 / 3), _pivot(low, high, 2 / 3)
        weight_1 = tl.zeros([TILE // 4], tl.float32)
        weight_2 = weight_1
        below_1 = tl.full([TILE // 4], -float("inf"), tl.float32)
        below_2 = below_1
        over_1 = tl.full([TILE // 4], float("inf"), tl.float32)
        over_2 = over_1
        for start in range(0, vocab_size, TILE):
            x = load_logits(row, start + _tile(TILE), vocab_size)
            weight = _weight(x, highest, inverse, BY_MASS)
            weight_1 += tl.sum(tl.where(x > pivot_1, weight, 0.0), axis=0)
            weight_2 += tl.sum(tl.where(x > pivot_2, weight, 0.0), axis=0)
            below_1 = tl.maximum(below_1, tl.max(tl.where(x > pivot_1, -float("inf"), x), axis=0))
            below_2 = tl.maximum(below_2, tl.max(tl.where(x > pivot_2, -float("inf"), x), axis=0))
            over_1 = tl.minimum(over_1, tl.min(tl.where(x > pivot_1, x, float("inf")), axis=0))
            over_2 = tl.minimum(over_2, tl.min(tl.where(x > pivot_2, x, float("inf")), axis=0))
        low, high, above = _narrow(low, high, above, tl.sum(weight_1), tl.max(below_1), tl.min(over_1), limit)
        low, high, above = _narrow(low, high, above, tl.sum(weight_2), tl.max(below_2), tl.min(over_2), limit)
    return high, above


@triton.jit
def _range_of(row: tl.tensor, vocab_size: tl.tensor, TILE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The lowest logit above -inf, and the highest of all."""
    low = tl.full([TILE // 4], float("inf"), tl.float32)
    high = tl.full([TILE // 4], -float("inf"), tl.float32)
    for start in range(0, vocab_size, TILE):
        x = load_logits(row, start + _tile(TILE), vocab_size)
        low = tl.minimum(low, tl.min(tl.where(x == -float("inf"), float("inf"), x), axis=0))
        high = tl.maximum(high, tl.max(x, axis=0))
    return tl.min(low), tl.max(high)


@triton.jit
def _mass_kept(
    row: tl.tensor,
    vocab_size: tl.tensor,
    value: tl.tensor,
    equals: tl.tensor,
    highest: tl.tensor,
    inverse: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """What all logits above `value` weigh, and at most `equals` of those equal to it: there may be fewer."""
    total = tl.zeros([TILE // 4], tl.float32)
    count = tl.zeros([TILE // 4], tl.int32)
    for start in range(0, vocab_size, TILE):
        x = load_logits(row, start + _tile(TILE), vocab_size)
        total += tl.sum(tl.where(x > value, _weight(x, highest, inverse, True), 0.0), axis=0)
        count += tl.sum((x == value).to(tl.int32), axis=0)
    return tl.sum(total) + tl.minimum(tl.sum(count), equals) * tl.exp((value - highest) * inverse)


@triton.jit
def _last_of_equals(
    row: tl.tensor, vocab_size: tl.tensor, value: tl.tensor, count: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """Id of the last of the first `count` tokens with that logit; the vocabulary's size if there are no more of them."""
    last = tl.full([], vocab_size, tl.int32)
    equals = tl.zeros([TILE // 4], tl.int32)
    for start in range(0, vocab_size, TILE):
        x = load_logits(row, start + _tile(TILE), vocab_size)
        equals += tl.sum((x == value).to(tl.int32), axis=0)
    if tl.sum(equals) > count:
        seen, last = 0, 0
        for start in range(0, vocab_size, TILE // 2):
            token = start + tl.arange(0, TILE // 2)
            equal = (load_logits(row, token, vocab_size) == value).to(tl.int32)
            place = tl.where(equal > 0, seen + tl.cumsum(equal), 0)
            last = tl.maximum(last, tl.max(tl.where((place > 0) & (place <= count), token, 0)))
            seen += tl.sum(equal)
    return last


@triton.jit
def _find_thresholds_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    rows: tl.tensor,
    lowest: tl.tensor,
    last_ids: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Row i keeps what is above lowest[i], and of what is equal to it the tokens up to last_ids[i].

    Dividing by the temperature keeps the order, so values are those of the logits themselves; only weights need it.
    """
    i = tl.program_id(0)
    entry = tl.load(rows + i)
    temperature = tl.load(temperatures + entry)
    top_k, top_p, min_p = tl.load(top_ks + entry), tl.load(top_ps + entry), tl.load(min_ps + entry)
    value, last = tl.full([], -float("inf"), tl.float32), tl.full([], vocab_size, tl.int32)
    by_count, by_mass, by_share = (top_k > 0) & (top_k < vocab_size), top_p < 1, min_p > 0
    if (temperature > 0) & (by_count | by_mass | by_share):
        row = logits + i.to(tl.int64) * logits_stride
        low, highest = _range_of(row, vocab_size, TILE)
        if tl.abs(highest) < float("inf"):
            temperature = tl.maximum(temperature, LEAST_TEMPERATURE)
            inverse = 1.0 / temperature
            equals = last
            if by_count:
                value, above = _lowest_kept(row, vocab_size, low, highest, inverse, top_k.to(tl.float32), False, TILE)
                equals = top_k - above.to(tl.int32)
                low = value
            if by_mass:  # shares are of what top_k leaves
                limit = top_p * _mass_kept(row, vocab_size, value, equals, highest, inverse, TILE)
                kept, above = _lowest_kept(row, vocab_size, low, highest, inverse, limit, True, TILE)
                # The tokens before the last of the equal ones weigh less than the limit.
                crossing = tl.ceil((limit - above) / tl.exp((kept - highest) * inverse))
                crossing = tl.maximum(tl.minimum(crossing, vocab_size), 1).to(tl.int32)
                equals = tl.where(kept > value, crossing, tl.minimum(crossing, equals))
                value = kept
            if by_count | by_mass:
                last = _last_of_equals(row, vocab_size, value, equals, TILE)
            if by_share:
                least = highest + temperature * tl.log(min_p)
                last = tl.where(least > value, vocab_size, last)
                value = tl.maximum(value, least)
    tl.store(lowest + i, value)
    tl.store(last_ids + i, last)


def find_thresholds(logits: Tensor, table: SamplingTable, rows: Tensor) -> tuple[Tensor, Tensor]:
    """What the filters of each row keep; the arguments are those of `choose_tokens`.

    Returns:
        lowest: [n] float32. All that is above is kept.
        last_ids: [n] int32. What is equal to that is kept if its token id is not above this.
    """
    n, vocab_size = logits.shape
    lowest = torch.empty(n, dtype=torch.float32, device=logits.device)
    last_ids = torch.empty(n, dtype=torch.int32, device=logits.device)
    _find_thresholds_kernel[(n,)](
        logits,
        table.temperature,
        table.top_k,
        table.top_p,
        table.min_p,
        rows,
        lowest,
        last_ids,
        vocab_size,
        logits.stride(0),
        TILE=TILE,
        num_warps=NUM_WARPS,
    )
    return lowest, last_ids


def launches() -> list[Launch]:
    """The configuration of the kernel."""
    signature = {
        "logits": "*fp32",
        "temperatures": "*fp32",
        "top_ks": "*i32",
        **dict.fromkeys(("top_ps", "min_ps"), "*fp32"),
        "rows": "*i32",
        "lowest": "*fp32",
        "last_ids": "*i32",
        **dict.fromkeys(("vocab_size", "logits_stride"), "i32"),
        "TILE": "constexpr",
    }
    return [Launch("find_thresholds", _find_thresholds_kernel, signature, {"TILE": TILE}, NUM_WARPS)]
