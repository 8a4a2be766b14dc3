"""Quantized matrices: what their numbers stand for, one by one, and some of their rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.kernels.quantized.tensor import Float8, Grouped, QuantizedTensor
from tests.drawn import FAST
from tests.kernels.quantized_matrices import Format, drawn


def grouped(outputs: int, groups: int, group: int, bits: int, zeros: bool, dtype: torch.dtype) -> Grouped:
    generator = torch.Generator().manual_seed(outputs + groups)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator)

    scales = torch.randn(outputs, groups, generator=generator).to(dtype)
    return Grouped(numbers(outputs, groups * group), scales, numbers(outputs, groups) if zeros else None, bits)


@FAST
@given(
    *(st.integers(1, most) for most in (5, 4, 9)),
    st.sampled_from([4, 8]),
    st.booleans(),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_a_number_is_its_distance_from_the_zero_in_scales(
    outputs: int, groups: int, group: int, bits: int, zeros: bool, scales: torch.dtype, dtype: torch.dtype
) -> None:
    source = grouped(outputs, groups, group, bits, zeros, scales)
    assert source.shape == (outputs, groups * group)
    assert source.group == group
    result = source.dequantize(dtype)
    assert result.dtype == dtype
    assert result.shape == source.shape
    for o, i in itertools.product(range(outputs), range(groups * group)):
        zero = 2 ** (bits - 1) if source.zeros is None else int(source.zeros[o, i // group])
        exact = (int(source.numbers[o, i]) - zero) * source.scales[o, i // group].double()
        assert result[o, i] == exact.float().to(dtype)


@pytest.mark.parametrize(
    ("groups", "group", "bits", "name"),
    [(1, 64, 8, "int8"), (1, 64, 4, "int4"), (2, 128, 4, "int4-128"), (2, 32, 8, "int8-32")],
)
def test_names_say_bits_and_the_group_if_there_are_several(groups: int, group: int, bits: int, name: str) -> None:
    assert grouped(3, groups, group, bits, False, torch.float16).format == name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_is_scaled_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    numbers, scales = torch.tensor([[1.0, -448.0, 0.001953125], [-0.5, 240.0, 3.5]]), torch.tensor([[0.3], [1e-3]])
    source = Float8(numbers.to(torch.float8_e4m3fn), scales)
    assert source.shape == (2, 3)
    assert source.format == "fp8"
    assert torch.equal(source.dequantize(dtype), (numbers * scales).to(dtype))


@pytest.mark.parametrize(
    "source",
    [
        grouped(5, 2, 8, 4, True, torch.float16),
        grouped(5, 2, 8, 8, False, torch.bfloat16),
        Float8(torch.randn(5, 16).to(torch.float8_e4m3fn), torch.rand(5, 1)),
        drawn(Format("Q4_K"), 5, 768),
    ],
    ids=["zeros", "no zeros", "fp8", "blocks"],
)
def test_rows_in_another_order(source: QuantizedTensor) -> None:
    rows = torch.tensor([4, 0, 0, 2])
    some = source[rows]
    assert type(some) is type(source)
    assert some.shape == (4, source.shape[1])
    assert some.format == source.format
    assert torch.equal(some.dequantize(torch.float32), source.dequantize(torch.float32)[rows])
