"""The few tokens among which the likeliest are, selected without sorting, as in Dr. Top-k (Gaihre et al., 2021).

All multiprocessors find the highest logit of each small group of tokens, the group's peak. What is above a bound is in the groups
whose peaks are: those alone are looked at again. Nothing depends on how the work is split among multiprocessors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.core import sampling
from nanoengine.core.sampling import SamplingTable
from nanoengine.kernels.triton import dependent
from nanoengine.kernels.triton.dependent import LAUNCH_PLAIN
from nanoengine.kernels.triton.launch import num_multiprocessors
from nanoengine.kernels.triton.prepared import Launch, launch_once

TILE = 1024
"""Logits of a tile."""

NUM_WARPS = 4

PROGRAMS_PER_SM = 8
"""Programs that the rows are split into, at least, for each multiprocessor: they keep enough loads on their way."""

MOST_PARTS = 256
"""Most programs that share a row, a power of two."""

GROUP = tl.constexpr(32)
"""Tokens of a group: the smaller, the less is looked at again in vain, and the more peaks there are."""

MOST_GROUPS = tl.constexpr(256)
"""Most groups of a row that are looked at again: 5% of the logits of a large vocabulary."""

LEAST_TEMPERATURE = tl.constexpr(sampling.LEAST_TEMPERATURE)


@triton.jit
def load_logits(row, token, size):
    """Logits of a row; -inf beyond its end, and inf for NaN: both mean that the row has no finite highest logit."""
    x = tl.load(row + token, mask=token < size, other=-float("inf"))
    return tl.where(x == x, x, float("inf"))


@triton.jit
def tile(TILE: tl.constexpr):
    """Offsets of a tile as [4, TILE / 4]: wide enough for all threads, so that a column is reduced by one of them alone."""
    return tl.arange(0, 4)[:, None] * (TILE // 4) + tl.arange(0, TILE // 4)[None, :]


@triton.jit
def weight_of(x, highest, inverse, BY_MASS: tl.constexpr):
    """What a token counts in a search: its probability, relative to the likeliest one's, or 1."""
    return tl.exp((x - highest) * inverse) if BY_MASS else tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def range_of(row, size, TILE: tl.constexpr):
    """The lowest logit above -inf, and the highest of all."""
    low = tl.full([TILE // 4], float("inf"), tl.float32)
    high = tl.full([TILE // 4], -float("inf"), tl.float32)
    for start in range(0, size, TILE):
        x = load_logits(row, start + tile(TILE), size)
        low = tl.minimum(low, tl.min(tl.where(x == -float("inf"), float("inf"), x), axis=0))
        high = tl.maximum(high, tl.max(x, axis=0))
    return tl.min(low), tl.max(high)


@triton.jit
def has_filters(temperature, top_k, top_p, min_p, vocab_size):
    """Whether fewer than all tokens of a row pass; the likeliest token always passes."""
    return (temperature > 0) & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0))


@triton.jit(do_not_specialize=["part_size"], do_not_specialize_on_alignment=["rows"])
def _find_peaks_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    rows,
    peaks,
    masses,
    vocab_size,
    logits_stride,
    part_size,
    LAUNCH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (i, j): the highest logit of each group in part j of row i, and what the group weighs relative to that.

    Nothing is done for a row without filters.
    """
    dependent.start(LAUNCH)
    dependent.wait(LAUNCH)
    i = tl.program_id(0)
    entry = tl.load(rows + i)
    temperature = tl.load(temperatures + entry)
    top_k, top_p, min_p = tl.load(top_ks + entry), tl.load(top_ps + entry), tl.load(min_ps + entry)
    if has_filters(temperature, top_k, top_p, min_p, vocab_size):
        inverse = 1.0 / tl.maximum(temperature, LEAST_TEMPERATURE)
        row = logits + i.to(tl.int64) * logits_stride
        num_groups = tl.cdiv(vocab_size, GROUP)
        first = tl.program_id(1) * part_size
        for start in range(first, tl.minimum(first + part_size, vocab_size), TILE):
            token = start + tl.arange(0, TILE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            x = load_logits(row, token, vocab_size)
            peak = tl.max(x, axis=1)
            weight = tl.where(x > -float("inf"), weight_of(x, peak[:, None], inverse, True), 0.0)
            group = start // GROUP + tl.arange(0, TILE // GROUP)
            out = i * num_groups + group
            tl.store(peaks + out, peak, mask=group < num_groups)
            tl.store(masses + out, tl.sum(weight, axis=1), mask=group < num_groups)


@triton.jit
def _order(x):
    """An integer for a float32 that is higher for higher numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _in_order(order):
    """The float32 of an `_order`, which undoes itself."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bound_of_groups(peaks, num_groups, low, highest, TILE: tl.constexpr):
    """A value that at most MOST_GROUPS groups are above, and half as many at least unless too many are alike."""
    few = tl.full([], 0, tl.int32)
    below, bound = _order(low) - 1, _order(tl.where(num_groups > MOST_GROUPS, highest, -float("inf")))
    while (below < bound) & (2 * few < MOST_GROUPS):
        middle = (below & bound) + ((below ^ bound) >> 1)  # their sum may not fit
        count = tl.zeros([TILE // 4], tl.int32)
        for start in range(0, num_groups, TILE):
            peak = load_logits(peaks, start + tile(TILE), num_groups)
            count += tl.sum((peak > _in_order(middle)).to(tl.int32), axis=0)
        above = tl.sum(count)
        fits = above <= MOST_GROUPS
        below = tl.where(fits, below, middle + 1)
        bound = tl.where(fits, middle, bound)
        few = tl.where(fits, above, few)
    return _in_order(bound)


@triton.jit
def gather(row, vocab_size, peaks, num_groups, bound, groups, candidates, candidate_ids, TILE: tl.constexpr):
    """Write all logits above the bound and their ids, in order, and first the groups that they are in.

    Returns how many logits that is: as many as the groups have tokens at most, which is MOST_GROUPS * GROUP.
    """
    num_chosen = 0
    for start in range(0, num_groups, TILE):
        group = start + tl.arange(0, TILE)
        chosen = load_logits(peaks, group, num_groups) > bound
        index = num_chosen + tl.cumsum(chosen.to(tl.int32)) - 1
        tl.store(groups + index, group, mask=chosen)
        num_chosen += tl.sum(chosen.to(tl.int32))
    tl.debug_barrier()  # other threads read what was written
    num_tokens = 0
    for start in range(0, num_chosen * GROUP, TILE):
        index = start + tl.arange(0, TILE)
        group = tl.load(groups + index // GROUP, mask=index < num_chosen * GROUP, other=num_groups)
        token = group * GROUP + index % GROUP
        x = load_logits(row, token, vocab_size)
        chosen = x > bound
        index = num_tokens + tl.cumsum(chosen.to(tl.int32)) - 1
        tl.store(candidates + index, x, mask=chosen)
        tl.store(candidate_ids + index, token, mask=chosen)
        num_tokens += tl.sum(chosen.to(tl.int32))
    tl.debug_barrier()
    return num_tokens


@triton.jit
def mass_of_groups(peaks, masses, num_groups, highest, inverse, TILE: tl.constexpr):
    """The probability mass of all logits."""
    total = tl.zeros([TILE // 4], tl.float32)
    for start in range(0, num_groups, TILE):
        group = start + tile(TILE)
        mass = tl.load(masses + group, mask=group < num_groups, other=0.0)
        total += tl.sum(mass * weight_of(load_logits(peaks, group, num_groups), highest, inverse, True), axis=0)
    return tl.sum(total)


@triton.jit
def mass_above(row, size, value, equals, highest, inverse, TILE: tl.constexpr):
    """The probability mass of all logits above `value`, and of at most `equals` equal to it: there may be fewer."""
    total = tl.zeros([TILE // 4], tl.float32)
    count = tl.zeros([TILE // 4], tl.int32)
    for start in range(0, size, TILE):
        x = load_logits(row, start + tile(TILE), size)
        total += tl.sum(tl.where(x > value, weight_of(x, highest, inverse, True), 0.0), axis=0)
        count += tl.sum((x == value).to(tl.int32), axis=0)
    return tl.sum(total) + tl.minimum(tl.sum(count), equals) * tl.exp((value - highest) * inverse)


def find_peaks(
    logits: Tensor, table: SamplingTable, rows: Tensor, launch: int = LAUNCH_PLAIN, start: Launch = launch_once
) -> tuple[Tensor, Tensor]:
    """The highest logit of each group of tokens, of the rows that have filters: the arguments are those of `choose_tokens`.

    Returns:
        peaks: [n, num_groups] float32.
        masses: [n, num_groups] float32: the probability of each group relative to that of its likeliest token.
    """
    n, vocab_size = logits.shape
    part_size = size_of_parts(n, vocab_size, num_multiprocessors(logits.device, interpreted=1))
    peaks = torch.empty(n, triton.cdiv(vocab_size, GROUP.value), dtype=torch.float32, device=logits.device)
    masses = torch.empty_like(peaks)
    columns = table.temperature, table.top_k, table.top_p, table.min_p
    start(
        _find_peaks_kernel,
        (n, triton.cdiv(vocab_size, part_size)),
        (logits, *columns, rows, peaks, masses, vocab_size, row_stride(logits), part_size),
        {"LAUNCH": launch, "TILE": TILE, "num_warps": NUM_WARPS, **dependent.options(launch)},
    )
    return peaks, masses


def size_of_parts(n: int, vocab_size: int, num_sms: int) -> int:
    """Tokens of a part of the vocabulary, such that n rows keep every multiprocessor busy."""
    tiles = triton.cdiv(vocab_size, TILE)
    parts = min(tiles, MOST_PARTS, triton.cdiv(PROGRAMS_PER_SM * num_sms, n))
    return triton.cdiv(tiles, parts) * TILE


def row_stride(logits: Tensor) -> int:
    """Numbers from row to row: for one row, whose stride may be anything, what it is for several."""
    return logits.stride(0) if len(logits) > 1 else logits.shape[1]
