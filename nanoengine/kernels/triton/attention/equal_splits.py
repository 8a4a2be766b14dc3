"""Sequences cut so that all programs of decode attention read equally many tokens, whatever sequences those are of, and the
results of a sequence's parts combined (Flash-Decoding, Dao et al., 2023).

All sequences stand one behind the other, in units of some tokens, and every program has as many units as another, or one more. It
may end one sequence, read others, and begin one more. Stream-K (Osama et al., 2023) cuts products like that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton import dependent
from nanoengine.kernels.triton.attention.paged_cache import LOWEST, first_visible, within

STEP = 64
"""Tokens: splits begin and end at multiples of them at least, and they are a multiple of every tile."""

FIELDS = 5
"""What is planned of each split: see `plan_splits`."""

SPLITS = 16
"""Splits that a program plans."""

SEQS = 256
"""Sequences of a tile of the plan."""


@triton.jit
def _split_of(unit, base, rest):
    """The split that has a unit: the first `rest` splits have base + 1 units, the others base."""
    of_longer = rest * (base + 1)
    return tl.where(unit < of_longer, unit // (base + 1), rest + (unit - of_longer) // tl.maximum(base, 1))


@triton.jit
def _lengths(seq_lens, query_start_loc, seq, num_seqs, WINDOW: tl.constexpr, STEP: tl.constexpr):
    """Tokens of sequences, the first that is seen, and units; one of length 0 has a unit, too, and what is none has no unit."""
    length = tl.load(seq_lens + seq, mask=seq < num_seqs, other=0)
    start = length * 0
    if WINDOW:
        queries = 1
        if query_start_loc is not None:
            starts = query_start_loc + seq
            queries = tl.load(starts + 1, mask=seq < num_seqs, other=0) - tl.load(starts, mask=seq < num_seqs, other=0)
        start = first_visible(length - queries, WINDOW)
    units = tl.where(seq < num_seqs, tl.maximum(tl.cdiv(length - start, STEP), 1), 0)
    return length, start, units


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["seq_lens", "query_start_loc"])
def _plan_kernel(
    plan,
    seq_lens,
    query_start_loc,
    num_seqs,
    num_splits,
    WINDOW: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    SEQS: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Program i plans splits i * SPLITS to (i + 1) * SPLITS; each counts all sequences."""
    dependent.start(LAUNCH)
    dependent.wait(LAUNCH)
    total = 0
    for first in range(0, num_seqs, SEQS):
        _, _, units = _lengths(seq_lens, query_start_loc, first + tl.arange(0, SEQS), num_seqs, WINDOW, STEP)
        total += tl.sum(units, axis=0)
    base, rest = total // num_splits, total % num_splits

    split = tl.program_id(0) * SPLITS + tl.arange(0, SPLITS)
    begin = (split * base + tl.minimum(split, rest))[:, None]  # its first unit
    seq_of = tl.zeros([SPLITS], tl.int32)  # the sequence of this unit
    length_of, start_of, first_unit, num_units = seq_of, seq_of, seq_of, seq_of
    before = 0
    for first in range(0, num_seqs, SEQS):
        seq = first + tl.arange(0, SEQS)
        length, start, units = _lengths(seq_lens, query_start_loc, seq, num_seqs, WINDOW, STEP)
        ends = (before + tl.cumsum(units, axis=0))[None, :]
        begins = ends - units[None, :]
        seq_of += tl.sum(((ends <= begin) & (seq < num_seqs)[None, :]).to(tl.int32), axis=1)
        covers = (begins <= begin) & (begin < ends)
        length_of += tl.sum(tl.where(covers, length[None, :], 0), axis=1)
        start_of += tl.sum(tl.where(covers, start[None, :] + (begin - begins) * STEP, 0), axis=1)
        first_unit += tl.sum(tl.where(covers, begins, 0), axis=1)
        num_units += tl.sum(tl.where(covers, units[None, :], 0), axis=1)
        before += tl.sum(units, axis=0)
    first_split = tl.where(seq_of < num_seqs, _split_of(first_unit, base, rest), split)
    parts = _split_of(first_unit + num_units - 1, base, rest) - first_split + 1

    exists = split <= num_splits
    size = num_splits + 1
    tl.store(plan + split, seq_of, mask=exists)
    tl.store(plan + size + split, start_of, mask=exists)
    tl.store(plan + 2 * size + split, length_of, mask=exists)
    tl.store(plan + 3 * size + split, first_split, mask=exists)
    tl.store(plan + 4 * size + split, parts, mask=exists)


def plan_splits(
    seq_lens: Tensor,
    num_splits: int,
    window: int = 0,
    launch: int = 0,
    query_start_loc: Tensor | None = None,
    step: int = STEP,
) -> Tensor:
    """Which tokens of which sequences each split has.

    Args:
        seq_lens: [num_seqs] int32, on the device; one of length 0 is work, too: somebody writes its zeros.
        window: as for `paged_decode`.
        launch: see `dependent.py`.
        query_start_loc: as for `paged_decode`.
        step: tokens of a unit, a multiple of STEP.

    Returns:
        [FIELDS, num_splits + 1] int32. Split j begins in sequence [0, j], which has [2, j] tokens, with token [1, j]. The first
        of the splits that read something of this sequence is [3, j], and they are [4, j]. It ends where the next one begins.
        Beyond the last split, and at splits for which nothing is left, is sequence `num_seqs`, which there is not.
    """
    plan = torch.empty(FIELDS, num_splits + 1, dtype=torch.int32, device=seq_lens.device)
    _plan_kernel[(triton.cdiv(num_splits + 1, SPLITS),)](
        plan,
        seq_lens,
        query_start_loc,
        len(seq_lens),
        num_splits,
        WINDOW=window,
        STEP=step,
        SPLITS=SPLITS,
        SEQS=SEQS,
        LAUNCH=launch,
        **dependent.options(launch),
    )
    return plan


@triton.jit
def part_of(split, is_first):
    """Where the results of a split's part of a sequence stand: every split has room for one that others began, and then for one
    that it begins itself.
    """
    return 2 * split + tl.where(is_first, 1, 0)


@triton.jit
def combine_splits(
    out,
    offset,
    exists,
    results,
    log_sums,
    first_split,
    parts,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Each part's result counts as much as the sum of its weights. The order is that of the parts, whoever came last.

    Args:
        place, exists: [ROWS], where in `out` each row goes, and whether there is such a row.
        results: [parts by `part_of`, ROWS, HEAD_DIM], of which those of the splits from `first_split` on are written.
        log_sums: [parts by `part_of`, ROWS], the logarithms of sums of weights; -inf where nothing has weight.
    """
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    highest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    combined = tl.zeros([ROWS, dim.shape[0]], tl.float32)
    for first in tl.range(0, parts, AT_ONCE, num_stages=3):  # loads results two rounds before their use
        part = first + tl.arange(0, AT_ONCE)
        index = part_of(first_split + part, part == 0)[None, :] * ROWS + row[:, None]
        written = exists[:, None] & (part < parts)[None, :]
        log_sum = tl.load(log_sums + index, mask=written, other=LOWEST)
        PADDED: tl.constexpr = dim.shape[0] > HEAD_DIM
        there = written[:, :, None] & (dim < HEAD_DIM)[None, None, :] if PADDED else written[:, :, None]
        result = tl.load(results + index[:, :, None] * HEAD_DIM + dim[None, None, :], mask=there, other=0.0)
        higher = tl.maximum(highest, tl.max(log_sum, axis=1))
        shrink = tl.exp2(highest - higher)
        weight = tl.exp2(log_sum - higher[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        combined = combined * shrink[:, None] + tl.sum(weight[:, :, None] * result, axis=1)
        highest = higher
    pointer = out + offset[:, None] + dim[None, :]
    result = combined / total[:, None]
    tl.store(pointer, result.to(out.dtype.element_ty), mask=within(exists, dim, HEAD_DIM))
