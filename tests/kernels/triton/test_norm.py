"""RMSNorm, alone and after an addition, against its formula in float64."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanoengine.kernels.triton.norm import add_rms_norm, rms_norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-6
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def assert_near(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape
    tolerance = TOLERANCE[result.dtype]
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@settings(deadline=None, max_examples=30)
@given(
    size=st.one_of(st.integers(1, 300), st.sampled_from([48, 128, 1024, 5120])),
    leading=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
def test_it_is_the_formula(size: int, leading: list[int], dtype: torch.dtype, seed: int) -> None:
    x, weight = random(seed, *leading, size, dtype=dtype), random(seed + 1, size)
    result = rms_norm(x, weight, EPS)
    assert result.dtype == dtype
    assert_near(result, exact(x, weight))


@settings(deadline=None, max_examples=20)
@given(
    size=st.sampled_from([1, 48, 127, 128, 1024, 5120]),
    rows=st.integers(1, 4),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
def test_the_norm_is_of_the_rounded_sum(size: int, rows: int, dtype: torch.dtype, seed: int) -> None:
    x, residual = random(seed, rows, size, dtype=dtype), random(seed + 1, rows, size, dtype=dtype) * 20
    weight, total = random(seed + 2, size, dtype=dtype), x + residual
    normed, after = add_rms_norm(x, residual, weight, EPS)
    if dtype is torch.bfloat16 and DEVICE.type == "cpu":
        assert_near(after, total.double())  # Triton's interpreter cuts off where the device rounds
    else:
        assert torch.equal(after, total)
    assert after.data_ptr() == residual.data_ptr()
    assert_near(normed, exact(after, weight))


def test_rows_with_gaps() -> None:
    x, residual, weight = random(0, 5, 70)[:, 3:51], random(1, 5, 60)[:, 8:56], random(2, 48)
    assert_near(rms_norm(x, weight, EPS), exact(x, weight))
    gap, total = random(1, 5, 60)[:, :8], x + residual
    normed, after = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(after, total)
    assert_near(normed, exact(total, weight))
    assert torch.equal(gap, random(1, 5, 60)[:, :8])


def test_heads_of_a_wider_row() -> None:
    x, weight = random(0, 4, 10 * 16).unflatten(-1, (10, 16))[:, 2:7], random(1, 16)
    assert_near(rms_norm(x, weight, EPS), exact(x, weight))


def test_large_values_do_not_overflow_half_precision() -> None:
    x, weight = torch.full((2, 128), 60_000.0, dtype=torch.float16, device=DEVICE), torch.ones(128, device=DEVICE)
    assert_near(rms_norm(x, weight, EPS), torch.ones(2, 128, dtype=torch.float64, device=DEVICE))


@pytest.mark.parametrize("shape", [(0, 48), (2, 0, 48)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    x, weight = torch.empty(shape, device=DEVICE), torch.ones(48, device=DEVICE)
    assert rms_norm(x, weight, EPS).shape == shape
    normed, after = add_rms_norm(x, x.clone(), weight, EPS)
    assert normed.shape == after.shape == shape
