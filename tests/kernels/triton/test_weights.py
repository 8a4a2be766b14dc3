"""Weights that learn their format from the rows that come."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanoengine.kernels.torch_kernels import RowMajor
from nanoengine.kernels.triton.float8 import Float8Rows
from nanoengine.kernels.triton.packed import Packed
from nanoengine.kernels.triton.weights import LateWeight
from nanoengine.quantization.tensor import Float8, Grouped, QuantizedTensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INPUTS = 64
FORMATS = ["int4", "int8", "fp8", "odd", "numbers"]


def rows(kind: str, count: int, inputs: int = INPUTS) -> Tensor | QuantizedTensor:
    if kind == "numbers":
        return torch.randn(count, inputs)
    if kind == "fp8":
        return Float8(torch.randn(count, inputs).to(torch.float8_e4m3fn), torch.rand(count, 1))
    bits, groups = {"int4": (4, 2), "int8": (8, 1), "odd": (8, 16)}[kind]
    numbers = torch.randint(0, 1 << bits, (count, inputs), dtype=torch.uint8)
    return Grouped(numbers, torch.rand(count, groups).half(), None, bits)


def numbers_of(weight: LateWeight) -> Tensor:
    content = weight.content
    return (content.tensor if isinstance(content, RowMajor) else content.dequantize(weight.dtype)).cpu()


@settings(deadline=None, max_examples=30)
@given(
    parts=st.lists(st.tuples(st.sampled_from(FORMATS), st.integers(1, 3)), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_parts_of_any_formats_in_any_order_are_what_they_stand_for(
    parts: list[tuple[str, int]], order: object, dtype: torch.dtype
) -> None:
    sources, first, places = [rows(kind, 8 * count) for kind, count in parts], 0, []
    for source in sources:
        places.append((first, source))
        first += source.shape[0]
    weight = LateWeight(first, INPUTS, dtype, DEVICE, has_float8=True)
    order.shuffle(places)  # type: ignore[attr-defined]
    for start, source in places:
        place = weight.rows(start, source.shape[0])
        assert place.shape == source.shape
        if isinstance(source, Tensor):
            place.copy_(source)
        else:
            place.copy_quantized(source)
    expected = [x.to(dtype) if isinstance(x, Tensor) else x.dequantize(dtype) for x in sources]
    assert torch.equal(numbers_of(weight), torch.cat(expected))


@pytest.mark.parametrize(
    ("kinds", "content"),
    [
        (["int4", "int4"], Packed),
        (["int8"], Packed),
        (["fp8", "fp8"], Float8Rows),
        (["int4", "int8"], RowMajor),
        (["fp8", "int8"], RowMajor),
        (["int8", "numbers"], RowMajor),
        (["numbers", "int8"], RowMajor),
        (["odd"], RowMajor),
    ],
)
def test_one_format_stays_and_others_become_numbers(kinds: list[str], content: type) -> None:
    weight = LateWeight(32 * len(kinds), INPUTS, torch.float32, DEVICE, has_float8=True)
    for i, kind in enumerate(kinds):
        source, place = rows(kind, 32), weight.rows(32 * i, 32)
        if isinstance(source, Tensor):
            place.copy_(source)
        else:
            place.copy_quantized(source)
    assert type(weight.content) is content


@pytest.mark.parametrize(
    ("has_float8", "outputs", "inputs"),
    [(False, 32, 64), (True, 30, 64), (True, 32, 60)],
    ids=["device", "outputs", "inputs"],
)
def test_floats_of_8_bits_that_nobody_multiplies_become_numbers(has_float8: bool, outputs: int, inputs: int) -> None:
    weight = LateWeight(outputs, inputs, torch.bfloat16, DEVICE, has_float8=has_float8)
    source = rows("fp8", outputs, inputs)
    assert not isinstance(source, Tensor)
    weight.rows(0, outputs).copy_quantized(source)
    assert isinstance(weight.content, RowMajor)
    assert torch.equal(weight.content.tensor.cpu(), source.dequantize(torch.bfloat16))


def test_a_weight_without_rows_is_one_of_numbers() -> None:
    weight = LateWeight(3, 5, torch.float16, DEVICE)
    assert weight.shape == (3, 5)
    assert isinstance(weight.content, RowMajor)
    assert (weight.content.tensor.shape, weight.content.tensor.dtype) == ((3, 5), torch.float16)
