"""Where tokens stand: as the kernels in torch have it."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.core.kernels import TokenPositions
from nanoengine.kernels.reference.operations import TorchKernels
from nanoengine.kernels.triton.compute_slot_mapping import TILE, compute_slot_mapping
from tests.kernels.formulas import DEVICE

NUM_ROWS = 9
"""The last is the padding row."""


def check(query_lens: list[int], *, padding: set[int], block_size: int, num_groups: int, seed: int) -> TokenPositions:
    rng, most = random.Random(seed), max(query_lens, default=0)

    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    rows = rng.sample(range(NUM_ROWS - 1), len(query_lens))
    rows = [NUM_ROWS - 1 if i in padding else row for i, row in enumerate(rows)]
    starts, width = [0, *accumulate(query_lens)], -(-(100 + most) // block_size) + 1
    tables = torch.randint(0, 1 << 27, (num_groups, NUM_ROWS, width), dtype=torch.int32, device=DEVICE)
    given = (
        ints([rng.choice([-1, rng.randint(0, 150_000)]) for _ in range(starts[-1])]),
        ints(rows),
        ints(starts),
        ints([rng.randint(0, 100) for _ in query_lens]),
        ints([rng.choice([-1, rng.randint(0, 150_000)]) for _ in range(NUM_ROWS)], torch.int64),
        F.pad(tables, (0, rng.randint(0, 3)), value=1 << 28)[:, :, :width],
        block_size,
        max(most, 2 if 0 in query_lens else 1),  # if it is 1, every sequence has a token in torch
    )
    found, expected = compute_slot_mapping(*given), TorchKernels().compute_slot_mapping(*given)
    is_padding = (expected.slot_mapping == -1).all(0)
    zeros = (found.input_ids, found.positions)  # where torch may have any token and position
    assert not any(values[is_padding].any() for values in zeros)
    expected.input_ids[is_padding] = expected.positions[is_padding] = 0
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype is other.dtype
        assert torch.equal(mine, other)
    assert all(slots.data_ptr() % 16 == 0 for slots in found.slot_mapping), "other kernels take it for granted"
    return found


@settings(max_examples=15)
@given(
    query_lens=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    padding=st.sets(st.integers(0, 5)),
    block_size=st.sampled_from([16, 64, 256]),
    num_groups=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_it_is_as_in_torch(
    query_lens: list[int], padding: set[int], block_size: int, num_groups: int, seed: int
) -> None:
    check(query_lens, padding=padding, block_size=block_size, num_groups=num_groups, seed=seed)


@pytest.mark.parametrize("longest", [TILE - 1, TILE, TILE + 1, 2 * TILE + 5])
def test_prompts_longer_than_a_tile(longest: int) -> None:
    check([1, longest, 3], padding=set(), block_size=16, num_groups=2, seed=longest)
