"""What the contract of kernels does not say of those in torch, and where tokens stand."""

from __future__ import annotations

import random as random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.kernels.native.operations import NativeKernels
from nanoengine.kernels.operations import Kernels
from nanoengine.kernels.reference.operations import TorchKernels
from tests.kernels.marks import needs_kernels


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_with_a_weight_near_1_is_rounded_once(dtype: torch.dtype) -> None:
    """1 + w in the dtype would be 1."""
    numbers = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 64, generator=numbers).to(dtype), 1 + torch.randn(64, generator=numbers) * 2e-3
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert torch.equal(TorchKernels().rms_norm(x, weight, 1e-6), exact.float().to(dtype))


@pytest.mark.parametrize(
    ("reason", "description"), [(None, "plain torch"), ("no native ones: no compiler", "no native ones: no compiler")]
)
def test_it_says_why_it_was_chosen(reason: str | None, description: str) -> None:
    assert description in TorchKernels(reason).description


# ---- where tokens stand

BATCHES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9), st.booleans()),  # tokens before, new tokens, is padding
    min_size=1,
    max_size=5,
)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("kernels", [TorchKernels, pytest.param(NativeKernels, marks=needs_kernels)])
@settings(max_examples=150)
@given(batch=BATCHES, block_size=st.sampled_from([1, 4, 16, 256]), is_decode=st.booleans(), seed=st.integers(0, 99))
def test_tokens_stand_where_the_formula_says(
    kernels: type[Kernels], batch: list[tuple[int, int, bool]], block_size: int, is_decode: bool, seed: int
) -> None:
    """Kernels.compute_slot_mapping against a loop, over tables of two groups, of block ids beyond 32 bits of slots."""
    rng = random.Random(seed)
    num_rows = 8
    tables = [[[rng.randrange(1 << 30) for _ in range(70)] for _ in range(num_rows)] for _ in range(2)]
    last_tokens = [rng.randrange(1000) for _ in range(num_rows)]
    rows = rng.sample(range(num_rows - 1), len(batch))
    tokens, ids, positions, seq_lens, starts = [], [], [], [], [0]
    slots: list[list[int]] = [[], []]
    for i, (before, count, is_padding) in enumerate(batch):
        if is_padding:
            before, count = 0, 9 * count  # more than a block table may have
        count = 1 if is_decode else count
        rows[i] = row = num_rows - 1 if is_padding else rows[i]
        for position in range(before, before + count):
            tokens.append(rng.choice([-1, rng.randrange(1000)]))
            ids.append(last_tokens[row] if tokens[-1] < 0 else tokens[-1])
            position = 0 if is_padding else position
            positions.append(position)
            for table, of_group in zip(tables, slots, strict=True):
                slot = table[row][position // block_size] * block_size + position % block_size
                of_group.append(-1 if is_padding else slot)
        starts.append(len(tokens))
        seq_lens.append(0 if is_padding else before + count)
    computed = [0 if is_padding else before for before, _, is_padding in batch]
    longest = max(end - start for start, end in pairwise(starts))
    placed = kernels().compute_slot_mapping(
        ints(tokens),
        ints(rows),
        ints(starts),
        ints(computed),
        torch.tensor(last_tokens),
        ints(tables),
        block_size,
        longest,
    )
    assert placed.input_ids.tolist() == ids
    assert placed.positions.tolist() == positions
    assert placed.slot_mapping.tolist() == slots
    assert placed.seq_lens.tolist() == seq_lens
    assert {placed.input_ids.dtype, placed.positions.dtype, placed.slot_mapping.dtype} == {torch.int64}
    assert placed.seq_lens.dtype == torch.int32
