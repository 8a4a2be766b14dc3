"""Gates, against their definitions in float64."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanoengine.kernels.gates import ACTIVATIONS
from nanoengine.kernels.triton.activation import gate_and_multiply
from tests.kernels.formulas import gated

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(1, 4),
    width=st.one_of(st.integers(1, 200), st.sampled_from([1023, 1024, 1025, 3072])),
    dtype=st.sampled_from(list(TOLERANCE)),
    activation=st.sampled_from(ACTIVATIONS),
    gap=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_it_is_the_formula(n: int, width: int, dtype: torch.dtype, activation: str, gap: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate_up = (torch.randn(n, 2 * width + gap, generator=generator) * 3).to(dtype).to(DEVICE)[:, : 2 * width]
    exact = gated(*gate_up.double().chunk(2, dim=-1), activation)
    result = gate_and_multiply(gate_up, activation)
    assert result.dtype == dtype
    assert result.shape == (n, width)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_of_any_size_are_finite(activation: str) -> None:
    gate = torch.tensor([[-3e38, -1000.0, -100.0, 0.0, 100.0, 1e30]], device=DEVICE)
    result = gate_and_multiply(torch.cat((gate, torch.ones_like(gate)), dim=-1), activation)
    torch.testing.assert_close(result, gate.clamp(min=0.0), rtol=0, atol=1e-30)


def test_what_is_not_finite_stays_so_where_nothing_clamps_it() -> None:
    gate_up = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1.0, 1.0, 1.0, 1.0, torch.nan]], device=DEVICE)
    result = gate_and_multiply(gate_up, "clamped")[0]
    torch.testing.assert_close(result[0].item(), 7.0 * 2, rtol=1e-4, atol=0)
    assert result[[2, 3]].isnan().all()


@pytest.mark.parametrize(("n", "width"), [(0, 8), (3, 0)])
def test_nothing_to_do(n: int, width: int) -> None:
    assert gate_and_multiply(torch.empty(n, 2 * width, device=DEVICE), "silu").shape == (n, width)
