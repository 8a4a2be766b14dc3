"""Sequences cut into parts that run side by side, and one result made of those of all parts (Flash-Decoding, 2023)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton.attention.paged_cache import LOWEST, within
from nanoengine.kernels.triton.tuning import Tuning

STEP = 64
"""Tokens: parts and shares are multiples of them at least, and they of every tile."""

LONGEST_PART = 1024
"""Tokens: a longer sequence is cut even where others fill the device."""

MAX_PARTS = 128
"""Most parts of a sequence, a power of two: one program combines them all, and it alone is waited for."""

MOST_PROGRAMS = 1 << 15
"""Programs of a launch that cuts sequences because they may be long: most of them find nothing to do, and take time for that."""

COMBINED = 512
"""Numbers of parts' results that a warp combines at once: 16 in every thread, and registers are left for the addresses."""

LEAST_COUNTERS = 1 << 14
"""Counters that a workspace has from the start: 64 KB, and all that 2048 sequences with 8 KV heads take."""


class Workspace:
    """What launches leave to the next one: counters of the programs that have arrived, zeros between two launches.

    Launches that share it must follow one another, as those on one stream do: every engine has its own. An address that a CUDA
    graph holds stays good as long as the workspace lives. More counters are made, and made zeros, by the first launch that wants
    them: it must not be the one that is captured.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []  # the last is used; graphs may write to the others

    def counters(self, count: int, device: torch.device) -> Tensor:
        """At least so many, int32."""
        if not self._kept or self._kept[-1].device != device or len(self._kept[-1]) < count:
            size = max(LEAST_COUNTERS, triton.next_power_of_2(count))
            self._kept.append(torch.zeros(size, dtype=torch.int32, device=device))
        return self._kept[-1]


class Split(NamedTuple):
    """How sequences are cut, as far as shapes tell. How long the parts of one are follows on the device: see `part_size`.

    Args:
        to_fill: parts of every sequence that fill the device.
        longest_part: tokens, a multiple of the step.
        most_parts: of any sequence that its block table has room for.
    """

    to_fill: int
    longest_part: int
    most_parts: int


def split(programs: int, longest: int, num_sms: int, tuning: Tuning, step: int) -> Split:
    """Cut sequences into as many parts as run side by side; those longer than LONGEST_PART into more.

    Where sequences fill the device, memory is busy, and parts gain nothing but balance: a long sequence among short ones would be
    waited for alone. No sequence has more than MAX_PARTS, nor all together more than MOST_PROGRAMS: where they would, the longest
    part is longer, so that as many of it hold any sequence.

    Args:
        programs: how many there are if no sequence is cut.
        longest: most tokens that can be seen of a sequence, by the width of its block table or its window.
        step: parts are multiples of so many tokens.
    """
    to_fill = min(max(1, num_sms * tuning.decode_programs_per_sm // programs), MAX_PARTS)
    most = max(1, min(MOST_PROGRAMS // programs, MAX_PARTS))
    tokens = max(LONGEST_PART, triton.cdiv(longest, most))
    longest_part = triton.cdiv(tokens, step) * step
    most_parts = max(1, min(to_fill, triton.cdiv(longest, step)), triton.cdiv(longest, longest_part))
    return Split(to_fill, longest_part, most_parts)


@triton.jit
def part_size(seen, to_fill, longest_part, STEP: tl.constexpr):
    """Tokens of every part but the last: equal shares in whole steps, as many as fill the device, or more if those were longer
    than `longest_part`, of which they are never more. A short sequence has fewer parts: no part is empty.
    """
    shares = tl.maximum(to_fill, tl.cdiv(seen, longest_part))
    return tl.maximum(tl.cdiv(tl.cdiv(seen, shares), STEP), 1) * STEP


@triton.jit
def combine(
    out,
    place,
    exists,
    results,
    log_sums,
    parts,
    most_parts,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Each part's result counts as much as the sum of its weights. The order is that of the parts, whoever came last.

    Args:
        place, exists: [ROWS], where in `out` each row goes, and whether there is such a row.
        results: [ROWS, most_parts, HEAD_DIM], of which `parts` are written.
        log_sums: [ROWS, most_parts], the logarithms of sums of weights; -inf where nothing has weight.
    """
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    PADDED: tl.constexpr = dim.shape[0] > HEAD_DIM
    every = tl.arange(0, MAX_PARTS)[None, :]
    there = exists[:, None] & (every < parts)
    log_sum = tl.load(log_sums + row[:, None] * most_parts + every, mask=there, other=LOWEST)
    highest = tl.max(log_sum, axis=1)
    total = highest + tl.log2(tl.sum(tl.exp2(log_sum - highest[:, None]), axis=1))
    combined = tl.zeros([ROWS, dim.shape[0]], tl.float32)
    for first in tl.range(0, parts, AT_ONCE, num_stages=3):  # asks for results two rounds before they are used
        part = first + tl.arange(0, AT_ONCE)
        index = row[:, None] * most_parts + part[None, :]
        written = exists[:, None] & (part < parts)[None, :]
        weight = tl.exp2(tl.load(log_sums + index, mask=written, other=LOWEST) - total[:, None])
        pointer = results + index[:, :, None] * HEAD_DIM + dim[None, None, :]
        here = written[:, :, None] & (dim < HEAD_DIM)[None, None, :] if PADDED else written[:, :, None]
        result = tl.load(pointer, mask=here, other=0.0)
        combined += tl.sum(weight[:, :, None] * result, axis=1)
    pointer = out + place[:, None] + dim[None, :]
    tl.store(pointer, combined.to(out.dtype.element_ty), mask=within(exists, dim, HEAD_DIM))
