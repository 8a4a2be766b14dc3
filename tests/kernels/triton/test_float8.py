"""Floats of 8 bits: rows that are rounded to them, and products by a stand-in for `_scaled_mm`, which computes its formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.kernels.operations import Norm
from nanoengine.kernels.quantized.tensor import Float8
from nanoengine.kernels.reference.operations import TorchKernels
from nanoengine.kernels.triton import operations
from nanoengine.kernels.triton.launch import float8_unsupported_reason
from nanoengine.kernels.triton.operations import TritonKernels
from nanoengine.kernels.triton.products import float8
from nanoengine.kernels.triton.products.float8 import Float8Rows, quantize_rows
from nanoengine.models.quantization.at_load import quantizer
from tests.kernels.formulas import DEVICE, random, weight_of

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


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


@settings(max_examples=20)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(0, 5),
    size=st.integers(1, 100),
    exponent=st.integers(-8, 8),
    seed=st.integers(0, 99),
)
def test_rows_are_rounded_each_with_a_scale(dtype: torch.dtype, rows: int, size: int, exponent: int, seed: int) -> None:
    x = (random(rows, size, dtype=torch.float32, seed=seed) * 2.0**exponent).to(dtype).to(DEVICE)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_products_are_those_of_the_rounded_numbers_and_near_those_of_x(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int
) -> None:
    monkeypatch.setattr(operations, "float8_unsupported_reason", lambda _: None)
    monkeypatch.setattr(float8, "scaled_mm", scaled_product)
    kernels, reference = TritonKernels(), TorchKernels()
    source = quantizer("fp8")(random(96, 48, dtype=torch.float32) / 8)
    assert isinstance(source, Float8)
    weight, numbers = kernels.new_weight(96, 48, dtype, DEVICE), source.dequantize(dtype).to(DEVICE)
    weight.rows(0, 96).copy_quantized(source)
    assert isinstance(weight.content, Float8Rows)
    x, bias = (random(*shape, dtype=dtype, seed=rows).to(DEVICE) for shape in ((rows, 48), (96,)))
    rounded, scales = quantize_rows(x)
    exact = (rounded.double() * scales) @ source.dequantize(torch.float32).double().T.to(DEVICE)
    for found, expected, of in (
        (kernels.linear(x, weight, bias), exact + bias.double(), dtype),
        (kernels.linear(x, weight, None), exact, dtype),
        (kernels.logits(x, weight), exact, torch.float32),
    ):
        assert found.dtype is of
        tolerance = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-6}[of]
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    norm, dense = 1 + random(48, dtype=torch.float32).to(DEVICE) / 8, weight_of(reference, numbers)
    around = [
        (
            k.product(x, w, activation="silu")[0],
            *k.product(x, w, bias, norm=Norm(norm, 1e-6), residual=x.clone()),
            k.product(x, w, norm=Norm(norm, 1e-6), activation="silu")[0],
        )
        for k, w in ((kernels, weight), (reference, dense))
    ]
    for found, expected in zip(*around, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.3, atol=0.3)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="torch multiplies floats of 8 bits by its own kernels on a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 9, 300])
def test_the_product_of_torch_is_its_formula(monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype) -> None:
    if (reason := float8_unsupported_reason(DEVICE)) is not None:
        pytest.skip(reason)
    x, bias = (random(*shape, dtype=dtype, seed=rows).to(DEVICE) for shape in ((rows, 128), (96,)))
    source, found = quantizer("fp8")(random(96, 128, dtype=torch.float32) / 11), []
    kernels = TritonKernels()
    for product in (float8.scaled_mm, scaled_product):
        monkeypatch.setattr(float8, "scaled_mm", product)
        weight = kernels.new_weight(96, 128, dtype, DEVICE)
        weight.rows(0, 96).copy_quantized(source)
        found.append((kernels.linear(x, weight, bias), kernels.logits(x, weight)))
    torch.testing.assert_close(*found, rtol=2.0**-6, atol=2.0**-6)


def test_a_cpu_does_not_multiply_them() -> None:
    assert "cpu" in str(float8_unsupported_reason(torch.device("cpu")))
