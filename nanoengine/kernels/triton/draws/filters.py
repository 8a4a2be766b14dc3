"""What min_p, top_k and top_p keep, without sorting: a program for each row searches for the lowest logit that its filters keep,
as in FlashInfer (Ye et al., 2025), among the few candidates of candidates.py.

Where the answer may be below those (top_k and top_p that keep hundreds of tokens, or logits that are all alike) it searches the
whole row. A row's limits depend neither on the other rows nor on the device: only sums of probabilities are rounded, always in
one order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.core.sampling import SamplingTable
from nanoengine.kernels.triton import dependent
from nanoengine.kernels.triton.dependent import LAUNCH_PLAIN
from nanoengine.kernels.triton.draws.candidates import (
    GROUP,
    LEAST_TEMPERATURE,
    MOST_GROUPS,
    bound_of_groups,
    find_peaks,
    gather,
    has_filters,
    load_logits,
    mass_above,
    mass_of_groups,
    range_of,
    row_stride,
    tile,
    weight_of,
)
from nanoengine.kernels.triton.prepared import Launch, launch_once

TILE = 4096
"""Logits of a tile: of a whole row many loads must be in flight, of candidates there are only hundreds."""

NUM_WARPS = 16


class Limits(NamedTuple):
    """What the filters of n rows keep, and the candidates among which all of that is."""

    lowest: Tensor  # [n] float32: all logits above it pass
    last_ids: Tensor  # [n] int32: logits equal to `lowest` pass if their token id is not above this
    counts: Tensor  # [n] int32: of candidates; 0 where the whole row has to be looked at
    candidates: Tensor  # [n, MOST_GROUPS * GROUP] float32: their logits, in the order of their ids
    candidate_ids: Tensor  # [n, MOST_GROUPS * GROUP] int32


@triton.jit
def _pivot(low, high, share: tl.constexpr):
    """A value in [low, high), low < high."""
    pivot = tl.maximum(low * (1 - share) + high * share, low)
    return tl.where(pivot < high, pivot, low)


@triton.jit
def _narrow(low, high, above, weight, below, over, limit):
    """A bracket, after a look at a pivot inside: the weight above it, the next logit below (or there) and the next above."""
    enough = weight < limit
    lower = enough & (below < high)
    return tl.where(enough, low, tl.maximum(low, over)), tl.where(lower, below, high), tl.where(lower, weight, above)


@triton.jit
def _lowest_above(row, size, low, highest, inverse, limit, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """The lowest logit, `low` or above, such that the probability mass above it is less than `limit`, and that mass.

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
        for start in range(0, size, TILE):
            x = load_logits(row, start + tile(TILE), size)
            weight = weight_of(x, highest, inverse, BY_MASS)
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
def _last_of_equals(row, size, value, count, TILE: tl.constexpr):
    """Id of the last of the first `count` tokens with that logit; the vocabulary's size if there are no more of them."""
    last = tl.full([], size, tl.int32)
    equals = tl.zeros([TILE // 4], tl.int32)
    for start in range(0, size, TILE):
        x = load_logits(row, start + tile(TILE), size)
        equals += tl.sum((x == value).to(tl.int32), axis=0)
    if tl.sum(equals) > count:
        seen, last = 0, 0
        for start in range(0, size, TILE // 2):
            token = start + tl.arange(0, TILE // 2)
            equal = (load_logits(row, token, size) == value).to(tl.int32)
            rank = tl.where(equal > 0, seen + tl.cumsum(equal), 0)
            last = tl.maximum(last, tl.max(tl.where((rank > 0) & (rank <= count), token, 0)))
            seen += tl.sum(equal)
    return last


@triton.jit
def _limits_of(row, size, highest, inverse, least, top_k, top_p, mass, by_count, by_mass, TILE: tl.constexpr):
    """The lowest logit that passes min_p, top_k and top_p, and the last token with that logit that passes; `size` if all pass.

    Args:
        least: the value of min_p.
        mass: of all.
    """
    value, last = least, tl.full([], size, tl.int32)
    if by_count | by_mass:
        low, _ = range_of(row, size, TILE)
        drops, equals = by_count | (least > low), last
        if by_count:
            kth, above = _lowest_above(row, size, low, highest, inverse, top_k.to(tl.float32), False, TILE)
            equals = tl.where(kth < least, last, top_k - above.to(tl.int32))
            value = tl.maximum(kth, least)
        low = tl.maximum(low, value)
        if by_mass & drops:  # shares are of what min_p and top_k leave
            mass = mass_above(row, size, value, equals, highest, inverse, TILE)
        if by_mass:
            limit = top_p * mass
            threshold, above = _lowest_above(row, size, low, highest, inverse, limit, True, TILE)
            # The mass of the tokens before the last of the equal ones is less than the limit.
            crossing = tl.ceil((limit - above) / tl.exp((threshold - highest) * inverse))
            crossing = tl.maximum(tl.minimum(crossing, size), 1).to(tl.int32)
            equals = tl.where(threshold > value, crossing, tl.minimum(crossing, equals))
            value = tl.maximum(threshold, value)
        last = _last_of_equals(row, size, value, equals, TILE)
    return value, last


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _find_limits_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    rows,
    peaks,
    masses,
    groups,
    lowest,
    last_ids,
    counts,
    candidates,
    candidate_ids,
    vocab_size,
    logits_stride,
    LAUNCH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Row i of `Limits`.

    Dividing by the temperature keeps the order, so values are those of the logits themselves; only weights need it.
    """
    dependent.start(LAUNCH)
    dependent.wait(LAUNCH)
    i = tl.program_id(0)
    entry = tl.load(rows + i)
    temperature = tl.load(temperatures + entry)
    top_k, top_p, min_p = tl.load(top_ks + entry), tl.load(top_ps + entry), tl.load(min_ps + entry)
    value, last = tl.full([], -float("inf"), tl.float32), tl.full([], vocab_size, tl.int32)
    count = tl.full([], 0, tl.int32)
    if has_filters(temperature, top_k, top_p, min_p, vocab_size):
        num_groups = tl.cdiv(vocab_size, GROUP)
        peaks += i * num_groups
        low, highest = range_of(peaks, num_groups, TILE)
        if tl.abs(highest) < float("inf"):
            row = logits + i.to(tl.int64) * logits_stride
            candidates += i * MOST_GROUPS * GROUP
            candidate_ids += i * MOST_GROUPS * GROUP
            temperature = tl.maximum(temperature, LEAST_TEMPERATURE)
            inverse = 1.0 / temperature
            by_count, by_mass = (top_k > 0) & (top_k < vocab_size), top_p < 1
            least = highest + temperature * tl.log(min_p)
            bound = bound_of_groups(peaks, num_groups, low, highest, TILE)
            groups += i * MOST_GROUPS
            num_candidates = gather(row, vocab_size, peaks, num_groups, bound, groups, candidates, candidate_ids, TILE)
            # Candidates are all that is above the bound: enough where a limit is reached among them.
            mass = mass_of_groups(peaks, masses + i * num_groups, num_groups, highest, inverse, TILE)
            if by_mass & (by_count == 0) & (min_p > 0) & (least <= bound):
                mass = mass_above(row, vocab_size, least, vocab_size, highest, inverse, TILE)
            gathered = mass_above(candidates, num_candidates, -float("inf"), 0, highest, inverse, TILE)
            enough = (least > bound) | (by_mass & (gathered >= top_p * mass))
            enough = tl.where(by_count, num_candidates >= top_k, enough)
            size = tl.full([], vocab_size, tl.int32)
            if enough:
                row, size, count = candidates, num_candidates, num_candidates
            value, last = _limits_of(row, size, highest, inverse, least, top_k, top_p, mass, by_count, by_mass, TILE)
            if enough:
                last = tl.load(candidate_ids + last, mask=last < num_candidates, other=vocab_size)
    tl.store(lowest + i, value)
    tl.store(last_ids + i, last)
    tl.store(counts + i, count)


def find_limits(
    logits: Tensor, table: SamplingTable, rows: Tensor, launch: int = LAUNCH_PLAIN, start: Launch = launch_once
) -> Limits:
    """What the filters of each row keep; the arguments are those of `choose_tokens`."""
    n, vocab_size = logits.shape
    device = logits.device
    peaks, masses = find_peaks(logits, table, rows, launch, start)
    groups = torch.empty(n, MOST_GROUPS.value, dtype=torch.int32, device=device)
    candidates = torch.empty(n, MOST_GROUPS.value * GROUP.value, dtype=torch.float32, device=device)
    limits = Limits(
        lowest=torch.empty(n, dtype=torch.float32, device=device),
        last_ids=torch.empty(n, dtype=torch.int32, device=device),
        counts=torch.empty(n, dtype=torch.int32, device=device),
        candidates=candidates,
        candidate_ids=torch.empty_like(candidates, dtype=torch.int32),
    )
    columns = table.temperature, table.top_k, table.top_p, table.min_p
    start(
        _find_limits_kernel,
        (n,),
        (logits, *columns, rows, peaks, masses, groups, *limits, vocab_size, row_stride(logits)),
        {"LAUNCH": launch, "TILE": TILE, "num_warps": NUM_WARPS, **dependent.options(launch)},
    )
    return limits
