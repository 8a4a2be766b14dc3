"""Products of few rows with what is around them, against the formula in float64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanoengine.kernels.gates import ACTIVATIONS
from nanoengine.kernels.triton.few_rows import ROWS, product_of_few_rows
from tests.kernels.formulas import gated

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-6


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def assert_near(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Triton's interpreter does not round bfloat16 to the nearest."""
    tolerance = {torch.float32: 1e-5, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}[dtype]
    torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=tolerance)


@settings(deadline=None, max_examples=25)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    num_rows=st.integers(1, ROWS),
    inputs=st.sampled_from([16, 48, 80, 256, 300, 520]),
    outputs=st.sampled_from([1, 15, 16, 40, 96]),
    before=st.sampled_from(["nothing", "norm", "addition and norm"]),
    behind=st.sampled_from(["nothing", "bias", *ACTIVATIONS]),
    seed=st.integers(0, 1000),
)
def test_it_is_the_addition_the_norm_the_product_and_the_gate(
    dtype: torch.dtype, num_rows: int, inputs: int, outputs: int, before: str, behind: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = draw(generator, num_rows, inputs, dtype=dtype)
    activation = behind if behind in ACTIVATIONS else None
    weight = (draw(generator, outputs * (1 + (activation is not None)), inputs, dtype=dtype).double() / inputs**0.5).to(
        dtype
    )
    residual = draw(generator, num_rows, inputs, dtype=dtype) if before == "addition and norm" else None
    norm = None if before == "nothing" else 1 + draw(generator, inputs, dtype=torch.float32) / 8
    bias = draw(generator, outputs, dtype=dtype) if behind == "bias" else None
    given = [None if tensor is None else tensor.clone() for tensor in (x, residual)]
    out, total = product_of_few_rows(x, weight, bias=bias, residual=residual, norm=norm, eps=EPS, activation=activation)

    assert out.dtype == total.dtype == dtype
    exact = x.double() if residual is None else x.double() + residual.double()
    assert_near(total, exact, dtype)
    if norm is not None:
        exact = exact * (exact.square().mean(1, keepdim=True) + EPS).rsqrt() * norm.double()
    exact = exact @ weight.double().T
    if bias is not None:
        exact += bias.double()
    if activation is not None:
        exact = gated(*exact.chunk(2, dim=1), activation)
    assert_near(out, exact, dtype)
    for tensor, before_it in zip((x, residual), given, strict=True):
        assert tensor is None or torch.equal(tensor, before_it), "nothing that is given is changed"


@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_row_does_not_depend_on_the_others(activation: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (draw(generator, ROWS, 100, dtype=torch.float32) for _ in range(2))
    weight, norm = draw(generator, 40, 100, dtype=torch.float32), torch.ones(100, device=DEVICE)
    options: dict[str, Any] = {"norm": norm, "eps": EPS, "activation": activation}
    together = product_of_few_rows(x, weight, residual=residual, **options)[0]
    alone = [product_of_few_rows(x[i : i + 1], weight, residual=residual[i : i + 1], **options)[0] for i in range(ROWS)]
    assert torch.equal(together, torch.cat(alone))
    x[3] = torch.nan
    spoilt = product_of_few_rows(x, weight, residual=residual, **options)[0]
    rest = [i for i in range(ROWS) if i != 3]
    assert torch.equal(spoilt[rest], together[rest])
    assert spoilt[3].isnan().all()


def test_large_gates_do_not_overflow() -> None:
    x = torch.tensor([[-1e4, 3.0], [1e4, 3.0]], device=DEVICE)
    out, _ = product_of_few_rows(x, torch.eye(2, device=DEVICE), activation="silu")
    torch.testing.assert_close(out.cpu(), torch.tensor([[0.0], [3e4]]))


def test_logits_are_not_rounded_to_half_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = draw(generator, 2, 64, dtype=torch.float16), draw(generator, 33, 64, dtype=torch.float16)
    out, total = product_of_few_rows(x, weight, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert total is x
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-5)


def test_no_rows_are_no_work() -> None:
    out, _ = product_of_few_rows(torch.empty(0, 16, device=DEVICE), torch.ones(4, 16, device=DEVICE))
    assert out.shape == (0, 4)
