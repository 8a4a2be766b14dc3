"""Sequences are cut into parts that hold all of them, of whole steps, and no more than a launch has programs for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from nanoengine.kernels.triton.attention.split_kv import MAX_PARTS, MOST_PROGRAMS, Split, Workspace, part_size, split
from torch import Tensor

from nanoengine.kernels.triton.attention import split_kv
from nanoengine.kernels.triton.tuning import DEFAULTS
from tests.kernels.formulas import DEVICE


@triton.jit
def _sizes_kernel(sizes: tl.tensor, first: tl.tensor, to_fill: tl.tensor, longest_part: tl.tensor, STEP: tl.constexpr):
    i = tl.arange(0, 1024)
    tl.store(sizes + i, part_size(first + i, to_fill, longest_part, STEP))


def part_sizes(first: int, cut: Split, step: int) -> Tensor:
    """What the device makes of 1024 lengths, from the first on."""
    sizes = torch.zeros(1024, dtype=torch.int32, device=DEVICE)
    _sizes_kernel[(1,)](sizes, first, cut.to_fill, cut.longest_part, step)
    return sizes.cpu()


@settings(max_examples=60, database=None)
@given(
    programs=st.integers(1, 32_000),
    longest=st.one_of(st.integers(0, 1 << 12), st.integers(0, 1 << 24)),
    num_sms=st.integers(1, 200),
    programs_per_sm=st.integers(1, 8),
    longest_part=st.one_of(st.integers(1, 2048), st.integers(1, 1 << 22)),
    step=st.sampled_from([64, 128, 256]),
    where=st.floats(0, 1),
)
def test_parts_hold_every_sequence_and_are_no_more_than_the_grid_has(
    programs: int, longest: int, num_sms: int, programs_per_sm: int, longest_part: int, step: int, where: float
) -> None:
    tuning = replace(DEFAULTS, decode_programs_per_sm=programs_per_sm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_kv, "LONGEST_PART", longest_part)
        cut = split(programs, longest, num_sms, tuning, step)
    assert 1 <= cut.most_parts <= min(MAX_PARTS, max(1, math.ceil(longest / step)))
    first = int(where * longest)
    for start in {0, first, max(0, longest - 1023)}:
        lens = torch.arange(start, start + 1024).clamp(max=longest)
        sizes = part_sizes(start, cut, step)[: longest - start + 1]
        lens = lens[: len(sizes)]
        parts = (lens + sizes - 1) // sizes
        assert (sizes % step == 0).all()
        assert (sizes >= step).all()
        assert (sizes <= cut.longest_part).all()
        assert (parts <= cut.most_parts).all()
        share = (lens + cut.to_fill - 1) // cut.to_fill
        assert (sizes < share.clamp(min=1) + step).all()  # as many parts as whole steps allow, to fill the device


@pytest.mark.parametrize("num_seqs", [1, 40, 256, 2000])
def test_a_launch_has_few_programs_however_long_sequences_may_be(num_seqs: int) -> None:
    """Most of them would find that their sequence is shorter."""
    cut = split(num_seqs * 8, 1 << 20, 132, DEFAULTS, 128)
    assert num_seqs * 8 * cut.most_parts <= max(MOST_PROGRAMS, num_seqs * 8) + num_seqs * 8
    assert cut.most_parts * cut.longest_part >= 1 << 20


def test_a_workspace_grows_and_keeps_what_a_graph_may_write_to() -> None:
    workspace = Workspace()
    few = workspace.counters(3, DEVICE)
    device = few.device  # as tensors say it: with its number
    assert workspace.counters(len(few), device) is few
    many = workspace.counters(len(few) + 1, device)
    assert len(many) > len(few)
    assert workspace.counters(3, device) is many
    for counters in (few, many):
        assert counters.dtype == torch.int32
        assert not counters.any()
        assert any(counters is kept for kept in workspace._kept)
