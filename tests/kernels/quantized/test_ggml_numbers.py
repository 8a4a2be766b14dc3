"""Every block format is what the package gguf makes of it, to the bit: in pieces, in other dtypes, and by the native kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nanoengine.kernels.native.weights import dequantized
from nanoengine.kernels.quantized.ggml_blocks import GGMLBlocks
from nanoengine.kernels.quantized.ggml_numbers import FLOATS, PIECE, SIZES, dequantize
from tests.kernels.marks import needs_kernels
from tests.kernels.quantized_matrices import HALVES

KINDS = [kind for kind in SIZES if kind not in FLOATS]
OF_EACH_SIZE = ("Q5_1", "NVFP4", "Q4_K")
"""One for each number of values in a block."""

Numbers = Callable[..., torch.Tensor]


def native(data: torch.Tensor, kind: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    blocks = GGMLBlocks(data.view(-1, shape[-1] // SIZES[kind][0] * SIZES[kind][1]), kind)
    return dequantized(blocks, dtype).view(*shape)


in_both_ways = pytest.mark.parametrize(
    "numbers", [pytest.param(dequantize, id="package"), pytest.param(native, id="native", marks=needs_kernels)]
)


def random_blocks(kind: str, count: int, seed: int) -> NDArray[np.uint8]:
    """[count, bytes]: any bytes, of the scales every finite float16; those of the first blocks subnormal, zero or the largest."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, SIZES[kind][1]), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        halves = random.integers(0, 0x10000, count, dtype=np.uint16)
        halves[halves & 0x7C00 == 0x7C00] ^= 0x4000  # of infinity and NaN nothing is promised
        halves[:6] = random.permutation(np.array([0x0001, 0x83FF, 0x03FF, 0x0000, 0x8000, 0xFBFF], np.uint16))[:count]
        blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
    return blocks


def expected(kind: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return reference(blocks, GGMLQuantizationType[kind])


def same_bits(ours: torch.Tensor, theirs: NDArray[np.float32]) -> bool:
    return ours.dtype == torch.float32 and np.array_equal(ours.numpy().view(np.uint32), theirs.view(np.uint32))


@in_both_ways
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(count=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_random_blocks_are_those_of_the_reference_to_the_bit(
    kind: str, numbers: Numbers, count: int, seed: int
) -> None:
    blocks = random_blocks(kind, count, seed)
    shape = (count, SIZES[kind][0])
    ours = numbers(torch.from_numpy(blocks).flatten(), kind, shape)
    assert same_bits(ours, expected(kind, blocks))


@in_both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_that_is_no_number_gives_none(numbers: Numbers, dtype: torch.dtype) -> None:
    blocks = torch.full((2, 34), 1, dtype=torch.uint8)
    blocks[:, :2] = torch.tensor([float("inf"), float("nan")]).half()[:, None].view(torch.uint8)
    ours = numbers(blocks.flatten(), "Q8_0", (2, 32), dtype)
    assert (ours[0] == float("inf")).all()
    assert ours[1].isnan().all()


@pytest.mark.parametrize("kind", OF_EACH_SIZE)
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_pieces_join_without_a_seam(kind: str, more: int) -> None:
    count = 2 * PIECE // SIZES[kind][0] + more
    blocks = random_blocks(kind, count, more + 1)
    ours = dequantize(torch.from_numpy(blocks).flatten(), kind, (1, count, SIZES[kind][0]))
    assert ours.shape == (1, count, SIZES[kind][0])
    assert same_bits(ours[0], expected(kind, blocks))


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        (dequantize, torch.bfloat16),
        (dequantize, torch.float16),
        pytest.param(native, torch.bfloat16, marks=needs_kernels),
    ],
)
@pytest.mark.parametrize("kind", OF_EACH_SIZE)
def test_other_dtypes_are_the_float32_rounded_once(kind: str, numbers: Numbers, dtype: torch.dtype) -> None:
    data = torch.from_numpy(random_blocks(kind, 64, 3)).flatten()
    shape = (64, SIZES[kind][0])
    found, right = numbers(data, kind, shape, dtype), numbers(data, kind, shape).to(dtype)
    assert torch.equal(found.nan_to_num(7), right.nan_to_num(7))


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_numbers_that_are_stored_as_they_are(kind: str, dtype: torch.dtype | None) -> None:
    numbers = torch.tensor([[1.0, -2.5, 3e-5], [0.1, 7.0, -0.0]]).to(FLOATS[kind])
    ours = dequantize(numbers.view(torch.uint8).flatten(), kind, (2, 3), dtype)
    assert ours.dtype == (dtype or FLOATS[kind])
    assert torch.equal(ours, numbers.to(dtype or FLOATS[kind]))


@pytest.mark.parametrize("kind", FLOATS)
def test_what_needs_no_conversion_is_not_copied_unless_its_address_is_odd(kind: str) -> None:
    data = torch.arange(33, dtype=torch.uint8)
    even, odd = dequantize(data[:32], kind, (-1,)), dequantize(data[1:], kind, (-1,))
    assert even.data_ptr() == data.data_ptr()
    assert odd.data_ptr() % odd.itemsize == 0
    assert torch.equal(odd.view(torch.uint8), data[1:])
