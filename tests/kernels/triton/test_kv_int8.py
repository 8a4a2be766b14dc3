"""K and V in 8 bits as Triton kernels write them: the numbers and scales of the definition, bit by bit."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux on x86-64 alone")

from nanoengine.kernels.kv_int8 import SCALE_BYTES, quantize
from nanoengine.kernels.triton.kv_int8 import check_scales, views
from nanoengine.kernels.triton.rotate_and_write import rotate_and_write, write_kv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def empty_caches(num_blocks: int, block_size: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """K and V, all scales NaN, with another layer between."""
    shape = num_blocks, heads, block_size * (dim + SCALE_BYTES)
    k, _, v = torch.full((3, *shape), -1, dtype=torch.int8, device=DEVICE)
    return k, v


@settings(deadline=None, max_examples=25)
@given(
    num_tokens=st.integers(1, 5),
    heads=st.integers(1, 5),
    dim=st.sampled_from([16, 32, 256]),
    block_size=st.sampled_from([16, 32]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    exponent=st.integers(-4, 4),
    in_one_go=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_what_is_written_is_what_the_definition_says_and_nothing_else_is(
    num_tokens: int,
    heads: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    exponent: int,
    in_one_go: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    qkv = (torch.randn(num_tokens, 3 * heads * dim, generator=generator) * 10.0**exponent).to(dtype).to(DEVICE)
    _, k, v = qkv.unflatten(1, (3, heads, dim)).unbind(1)
    slots = torch.randperm(2 * block_size, generator=generator)[:num_tokens].to(DEVICE)
    slots[: seed % 2] = -1
    caches = empty_caches(2, block_size, heads, dim)
    (k_numbers, k_scales), (v_numbers, v_scales) = (views(cache, block_size) for cache in caches)
    scales = {"k_scales": k_scales, "v_scales": v_scales}
    if in_one_go:
        rotate_and_write(qkv, None, None, 0.0, None, None, k_numbers, v_numbers, slots, **scales)
    else:
        write_kv(k, v, k_numbers, v_numbers, slots, **scales)
    written = slots >= 0
    for (numbers, its_scales), rows in zip(((k_numbers, k_scales), (v_numbers, v_scales)), (k, v), strict=True):
        expected_numbers, expected_scales = quantize(rows)
        where = slots[written] // block_size, slots[written] % block_size
        assert torch.equal(its_scales[where], expected_scales[written])
        assert torch.equal(numbers[where], expected_numbers[written])
        numbers[where], its_scales[where] = -1, torch.nan
        assert its_scales.isnan().all()
        assert (numbers == -1).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("in_one_go", [False, True])
def test_a_head_that_is_not_finite_has_nan_for_a_scale_and_its_neighbours_have_not(in_one_go: bool, bad: float) -> None:
    qkv = torch.ones(2, 3, 2, 16, device=DEVICE)
    qkv[1, 1, 0, 3] = qkv[0, 2, 1, 12] = bad
    (k_numbers, k_scales), (v_numbers, v_scales) = (views(cache, 16) for cache in empty_caches(1, 16, 2, 16))
    slots, scales = torch.tensor([4, 9], device=DEVICE), {"k_scales": k_scales, "v_scales": v_scales}
    if in_one_go:
        rotate_and_write(qkv.flatten(1), None, None, 0.0, None, None, k_numbers, v_numbers, slots, **scales)
    else:
        write_kv(qkv[:, 1], qkv[:, 2], k_numbers, v_numbers, slots, **scales)
    assert k_scales[0, slots].isnan().tolist() == [[False, False], [True, False]]
    assert v_scales[0, slots].isnan().tolist() == [[False, True], [False, False]]


def test_scales_that_lie_elsewhere_are_a_mistake() -> None:
    numbers, scales = views(empty_caches(2, 16, 2, 16)[0], 16)
    check_scales(numbers, scales)
    with pytest.raises(AssertionError, match="strides"):
        check_scales(numbers, scales.contiguous())
