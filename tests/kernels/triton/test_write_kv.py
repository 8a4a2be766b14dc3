"""The write of K and V as they are, into caches of any strides."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanoengine.kernels.triton.rotate_and_write import write_kv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def caches_of_nan(num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """As layers have them that share blocks: heads before slots, K beside V, and another layer between."""
    memory = torch.full((num_blocks, 2, 2, heads, block_size, dim), torch.nan, dtype=dtype, device=DEVICE)
    return [memory[:, 1, i].transpose(1, 2) for i in range(2)]


@settings(deadline=None, max_examples=25)
@given(
    num_tokens=st.integers(0, 6),
    heads=st.integers(1, 5),
    dim=st.sampled_from([16, 32, 128, 256]),
    block_size=st.sampled_from([16, 32, 256]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    gap=st.integers(0, 9),
    nowhere=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_each_token_is_in_its_slot_bit_by_bit_and_nothing_else_is_touched(
    num_tokens: int, heads: int, dim: int, block_size: int, dtype: torch.dtype, gap: int, nowhere: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    width = heads * dim
    projected = torch.randn(num_tokens, 2 * width + gap, generator=generator).to(dtype).to(DEVICE)
    k, v = (projected[:, i * width : (i + 1) * width].unflatten(-1, (heads, dim)) for i in range(2))
    slots = torch.randperm(3 * block_size, generator=generator)[:num_tokens].to(DEVICE)
    if nowhere:
        slots[::2] = -1
    caches = caches_of_nan(3, block_size, heads, dim, dtype)
    write_kv(k, v, *caches, slots)
    written = slots >= 0
    for cache, source in zip(caches, (k, v), strict=True):
        found = cache.reshape(-1, heads, dim)
        assert torch.equal(found[slots[written]], source[written])
        found[slots[written]] = torch.nan
        assert found.isnan().all()


def test_more_heads_than_a_group() -> None:
    k, v = torch.randn(2, 3, 40, 128, device=DEVICE)
    caches = caches_of_nan(1, 16, 40, 128, torch.float32)
    write_kv(k, v, *caches, torch.tensor([7, 0, 3], device=DEVICE))
    assert torch.equal(caches[0][0, [7, 0, 3]], k)
    assert torch.equal(caches[1][0, [7, 0, 3]], v)


def test_heads_with_gaps_between_them_are_a_mistake() -> None:
    k = torch.randn(3, 4, 32, device=DEVICE)[:, ::2]
    with pytest.raises(AssertionError):
        write_kv(k, k, *caches_of_nan(1, 16, 2, 32, torch.float32), torch.tensor([0, 1, 2], device=DEVICE))
