"""Products of normed rows in one native kernel, against their formulas and against the same in separate kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.kernels.native_kernels import NativeKernels
from nanoengine.kernels.native_operations import unsupported_reason
from tests.drawn import FAST
from tests.kernels.formulas import DTYPES, ROUNDING, SUMMED, assert_close, random, weight_of

REASON = unsupported_reason(torch.device("cpu"), torch.float32)
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")
EPS = 1e-6


def normed(x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The norm in float64, and what it is of."""
    total = x if residual is None else x + residual
    exact = total.double()
    return exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double(), total


def assert_near(result: Tensor, exact: Tensor, magnitude: Tensor) -> None:
    """As after one rounding of the norm to the dtype, which it may keep."""
    assert_close(result, exact, magnitude * (1 + 1.1 * ROUNDING[result.dtype] / SUMMED))


@FAST
@given(*(st.integers(1, most) for most in (130, 100, 700)), st.booleans(), st.booleans(), st.sampled_from(DTYPES))
def test_a_product_of_normed_rows(
    rows: int, outputs: int, inputs: int, added: bool, bias: bool, dtype: torch.dtype
) -> None:
    kernels, x, norm = NativeKernels(), random(rows, inputs, dtype=dtype), random(inputs, dtype=torch.float32, seed=1)
    residual = random(rows, inputs, dtype=dtype, seed=2) if added else None
    w, b = random(outputs, inputs, dtype=dtype, seed=3), random(outputs, dtype=dtype, seed=4) if bias else None
    before, (factors, total) = x.clone(), normed(x, residual, norm)
    out, carried = kernels.norm_linear(x, residual, norm, EPS, weight_of(kernels, w), b)
    assert torch.equal(x, before)
    assert torch.equal(carried, total)
    exact, magnitude = factors @ w.double().T, factors.abs() @ w.double().abs().T
    if b is not None:
        exact, magnitude = exact + b.double(), magnitude + b.double().abs()
    assert_near(out, exact, magnitude)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("size", [64, 70])
@pytest.mark.parametrize("rows", [1, 7, 97])
def test_gates_of_normed_rows(rows: int, size: int, dtype: torch.dtype) -> None:
    kernels, x, residual = NativeKernels(), random(rows, 300, dtype=dtype), random(rows, 300, dtype=dtype, seed=1)
    norm, weight = (
        random(300, dtype=torch.float32, seed=2),
        weight_of(kernels, random(2 * size, 300, dtype=dtype, seed=3) * 0.05),
    )
    factors, total = kernels.add_rms_norm(x, residual.clone(), norm, EPS)
    apart = kernels.gated_linear(factors, weight)
    out, carried = kernels.norm_gated_linear(x, residual, norm, EPS, weight)
    assert torch.equal(carried, total)
    if dtype is torch.float32:
        assert torch.equal(out, apart)
    else:
        torch.testing.assert_close(out.float(), apart.float(), rtol=0.05, atol=0.05)
