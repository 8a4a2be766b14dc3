"""SwiGLU's gate, against its formula in float64."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanoengine.kernels.triton.activation import silu_and_multiply

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(1, 4),
    width=st.one_of(st.integers(1, 200), st.sampled_from([1023, 1024, 1025, 3072])),
    dtype=st.sampled_from(list(TOLERANCE)),
    gap=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_it_is_the_formula(n: int, width: int, dtype: torch.dtype, gap: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate_up = (torch.randn(n, 2 * width + gap, generator=generator) * 3).to(dtype).to(DEVICE)[:, : 2 * width]
    gate, up = gate_up.double().chunk(2, dim=-1)
    result = silu_and_multiply(gate_up)
    assert result.dtype == dtype
    assert result.shape == (n, width)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(result.double(), gate / (1 + (-gate).exp()) * up, rtol=tolerance, atol=tolerance)


def test_gates_of_any_size_are_finite() -> None:
    gate = torch.tensor([[-3e38, -1000.0, -100.0, 0.0, 100.0, 1e30]], device=DEVICE)
    result = silu_and_multiply(torch.cat((gate, torch.ones_like(gate)), dim=-1))
    torch.testing.assert_close(result, gate.clamp(min=0.0), rtol=0, atol=1e-30)


@pytest.mark.parametrize(("n", "width"), [(0, 8), (3, 0)])
def test_nothing_to_do(n: int, width: int) -> None:
    assert silu_and_multiply(torch.empty(n, 2 * width, device=DEVICE)).shape == (n, width)
