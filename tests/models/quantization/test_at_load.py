"""Quantizers against what their formats promise: how far a number can be from what stands for it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.errors import InvalidConfig, InvalidWeights
from nanoengine.kernels.quantized.tensor import Float8, Grouped
from nanoengine.models.options import QUANTIZATIONS
from nanoengine.models.quantization.at_load import AT_ONCE, quantizer

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def drawn(outputs: int, inputs: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of different sizes, one of zeros and one without a negative number."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(outputs, inputs, generator=generator) * torch.rand(outputs, 1, generator=generator)
    values[0] = 0
    values[-1] = values[-1].abs()
    return values.to(dtype)


def grouped(name: str, values: Tensor) -> Grouped:
    found = quantizer(name)(values)
    assert isinstance(found, Grouped)
    return found


@settings(max_examples=25)
@given(st.integers(2, 9), st.integers(1, 70), st.sampled_from(FLOATS), st.integers(0, 99))
def test_int8_errs_by_half_a_step_of_each_output(outputs: int, inputs: int, dtype: torch.dtype, seed: int) -> None:
    values = drawn(outputs, inputs, seed, dtype)
    found = grouped("int8", values)
    assert (found.bits, found.zeros, found.scales.dtype, found.scales.shape) == (8, None, torch.float32, (outputs, 1))
    assert (found.numbers.dtype, int(found.numbers.min()) >= 1) == (torch.uint8, True)
    step = values.float().abs().amax(1, keepdim=True) / 127
    error = (found.dequantize(torch.float32) - values.float()).abs()
    assert (error <= 0.5001 * step).all()
    assert (found.dequantize(torch.float32)[0] == 0).all()


@settings(max_examples=25)
@given(
    st.sampled_from([("int4", 32), ("int4-128", 128)]), st.integers(2, 9), st.integers(1, 4), st.sampled_from(FLOATS)
)
def test_int4_errs_no_more_than_plain_rounding_of_each_group(
    form: tuple[str, int], outputs: int, groups: int, dtype: torch.dtype
) -> None:
    name, group = form
    values = drawn(outputs, groups * group, groups, dtype)
    found = grouped(name, values)
    assert found.zeros is not None
    assert (found.bits, found.group, found.scales.dtype) == (4, group, torch.float16)
    assert (found.numbers.dtype, found.zeros.dtype, int(found.numbers.max()) < 16) == (torch.uint8, torch.uint8, True)
    exact = values.double().unflatten(1, (-1, group))
    low, high = exact.amin(2, keepdim=True).clamp(max=0), exact.amax(2, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).half().double().clamp(min=1e-30)
    zero = (-low / scale).round()
    plain = (((exact / scale + zero).round().clamp(0, 15) - zero) * scale - exact).square().sum(2)
    error = (found.dequantize(torch.float32).double() - values.double()).unflatten(1, (-1, group)).square().sum(2)
    assert (error <= 1.001 * plain + 1e-12).all()
    assert (found.dequantize(torch.float32)[0] == 0).all()


@pytest.mark.parametrize(("name", "bound"), [("int8", 0.009), ("int4", 0.09), ("int4-128", 0.11), ("fp8", 0.027)])
def test_normal_numbers_lose_little(name: str, bound: float) -> None:
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    error = quantizer(name)(values).dequantize(torch.float32) - values
    assert error.norm() / values.norm() < bound


@settings(max_examples=25)
@given(st.integers(2, 9), st.integers(1, 70), st.sampled_from(FLOATS), st.integers(0, 99))
def test_fp8_rounds_to_three_bits_behind_the_first(outputs: int, inputs: int, dtype: torch.dtype, seed: int) -> None:
    values = drawn(outputs, inputs, seed, dtype)
    found = quantizer("fp8")(values)
    assert isinstance(found, Float8)
    assert (found.numbers.dtype, found.scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert found.scales.shape == (outputs, 1)
    exact = values.float()
    error = (found.dequantize(torch.float32) - exact).abs()
    assert (error <= 2.0**-4 * 1.0001 * exact.abs() + found.scales * 2.0**-10).all()


@pytest.mark.parametrize(
    ("name", "inputs", "format"),
    [
        ("int4", 96, "int4-32"),
        ("int4-128", 256, "int4-128"),
        ("int4-128", 96, "int4-32"),
        ("int4", 48, "int8"),
        ("int4-128", 33, "int8"),
    ],
)
def test_a_row_that_is_no_multiple_of_a_group_has_smaller_ones(name: str, inputs: int, format: str) -> None:
    assert quantizer(name)(drawn(4, inputs, 0)).format == format


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_a_large_matrix_is_that_of_its_rows(name: str) -> None:
    """It is quantized in pieces."""
    values = drawn(2 * AT_ONCE // 1024 + 5, 1024, 0)
    whole = quantizer(name)(values).dequantize(torch.float32)
    rows = torch.tensor([0, AT_ONCE // 1024 - 1, AT_ONCE // 1024, len(values) - 1])
    assert torch.equal(whole[rows], quantizer(name)(values[rows]).dequantize(torch.float32))


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_numbers_that_are_not_finite_are_refused(name: str, number: float) -> None:
    values = drawn(4, 128, 0)
    values[2, 70] = number
    with pytest.raises(InvalidWeights, match=r"not finite.*quantization=None"):
        quantizer(name)(values)


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_numbers_whose_sum_is_not_finite_are_no_mistake(name: str) -> None:
    values = torch.full((1, 128), 3e38)
    if name.startswith("int4"):
        with pytest.raises(InvalidWeights, match=r"3e\+38.*int8"):
            quantizer(name)(values)
    else:
        torch.testing.assert_close(quantizer(name)(values).dequantize(torch.float32), values)


def test_what_cannot_be_used_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match=r"too old.*'int8'"):
        quantizer("fp8", "the GPU is too old")
    assert quantizer("int8", "the GPU is too old") is quantizer("int8")
