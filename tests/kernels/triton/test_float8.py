"""Floats of 8 bits: rows that are rounded to them, and products by a stand-in for `_scaled_mm`, which computes its formula."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanoengine.kernels.triton.float8 import Float8Rows, can_multiply, quantize_rows
from nanoengine.quantization.tensor import Float8, Grouped

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def scaled_product(
    a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """What `_scaled_mm` computes, and what it demands."""
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert a.is_contiguous()
    assert b.T.is_contiguous()
    assert b.shape[0] % 16 == b.shape[1] % 16 == 0
    assert a_scales.dtype == b_scales.dtype == torch.float32
    by_rows = a_scales.shape == (len(a), 1) and b_scales.shape == (1, b.shape[1])
    assert (by_rows and out_dtype is torch.bfloat16) or a_scales.shape == b_scales.shape == (1, 1)
    out = (a.double() * a_scales.double()) @ (b.double() * b_scales.double())
    return (out if bias is None else out + bias.double()).to(out_dtype)


def quantized(values: Tensor) -> Float8:
    scales = values.abs().amax(1, keepdim=True).float() / 448
    return Float8((values / scales).to(torch.float8_e4m3fn), scales)


def rows_of(source: Float8) -> Float8Rows:
    place = Float8Rows.like(source, source.shape[0], DEVICE)
    assert place.take_rows(0, source)
    return place


@settings(deadline=None, max_examples=20)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    rows=st.integers(0, 5),
    size=st.integers(1, 100),
    exponent=st.integers(-8, 8),
    seed=st.integers(0, 99),
)
def test_rows_are_rounded_each_with_a_scale(dtype: torch.dtype, rows: int, size: int, exponent: int, seed: int) -> None:
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)).mul(2.0**exponent).to(dtype).to(DEVICE)
    numbers, scales = quantize_rows(x)
    assert (numbers.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert (numbers.shape, scales.shape) == (x.shape, (rows, 1))
    found, exact = numbers.float() * scales, x.float()
    error = (found - exact).abs()
    assert (error <= 2.0**-4 * exact.abs() + scales * 2.0**-10).all(), "half a step, which is 2^-9 for the smallest"
    highest = exact.abs().amax(1, keepdim=True)
    torch.testing.assert_close(found.abs().amax(1, keepdim=True), highest, rtol=1e-6, atol=0)
    again = (exact / scales).to(torch.float8_e4m3fn)
    assert (numbers.float() == again.float()).all()


def test_a_row_of_zeros_stays_that_and_one_that_is_not_finite_says_so() -> None:
    x = torch.ones(4, 20, device=DEVICE)
    x[0], x[1, 3], x[2, 3] = 0, torch.nan, -torch.inf
    numbers, scales = quantize_rows(x)
    found = numbers.float() * scales
    assert (found[0] == 0).all()
    assert found[1:3].isnan().all()
    torch.testing.assert_close(found[3], x[3])


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_products_are_those_of_the_rounded_numbers(out_dtype: torch.dtype, has_bias: bool, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    source = quantized(torch.randn(32, 48, generator=generator))
    x = torch.randn(rows, 48, generator=generator).to(out_dtype).to(DEVICE)
    bias = torch.randn(32, generator=generator).to(out_dtype).to(DEVICE) if has_bias else None
    out = rows_of(source).product(x, bias, out_dtype, scaled_product)
    numbers, scales = quantize_rows(x)
    exact = (numbers.double() * scales) @ source.dequantize(torch.float32).double().T.to(DEVICE)
    if bias is not None:
        exact += bias.double()
    assert out.dtype == out_dtype
    tolerance = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-6}[out_dtype]
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


def test_a_weight_stands_for_what_it_was_given() -> None:
    source = quantized(torch.randn(16, 32))
    place, chosen = rows_of(source), torch.tensor([5, 0, 5])
    assert torch.equal(place.dequantize(torch.bfloat16).cpu(), source.dequantize(torch.bfloat16))
    found = place.dequantize(torch.bfloat16, chosen.to(DEVICE)).cpu()
    assert torch.equal(found, source.dequantize(torch.bfloat16)[chosen])
    other = Grouped(torch.zeros(16, 32, dtype=torch.uint8), torch.ones(16, 1), None, 8)
    assert not place.take_rows(0, other)


@pytest.mark.parametrize(("outputs", "inputs", "fits"), [(16, 32, True), (24, 32, False), (16, 40, False)])
def test_sizes_that_torch_refuses_are_known(outputs: int, inputs: int, fits: bool) -> None:
    assert can_multiply(quantized(torch.randn(outputs, inputs)), outputs) is fits
