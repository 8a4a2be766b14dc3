"""The oracle itself, against formulas in float64."""

from __future__ import annotations

import pytest
import torch

from nanoengine.kernels.reference import TorchKernels


def weight_of(kernels: TorchKernels, rows: torch.Tensor) -> object:
    weight = kernels.new_weight(*rows.shape)
    weight.rows(0, len(rows)).copy_(rows)
    return weight


def test_a_weight_is_filled_row_by_row() -> None:
    kernels, rows = TorchKernels(), torch.randn(5, 3)
    weight = kernels.new_weight(5, 3)
    weight.rows(3, 2).copy_(rows[3:])
    weight.rows(0, 3).copy_(rows[:3])
    assert weight.shape == (5, 3)
    assert torch.equal(kernels.embed(torch.tensor([4, 0]), weight), rows[[4, 0]])


def test_products_norms_and_gates_are_their_formulas() -> None:
    kernels, rows, x = TorchKernels(), torch.randn(8, 6), torch.randn(4, 6)
    weight, exact = weight_of(kernels, rows), x.double() @ rows.double().T
    bias, scale, residual = torch.randn(8), torch.randn(6), torch.randn(4, 6)

    def check(result: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)

    check(kernels.linear(x, weight, bias), exact + bias.double())  # type: ignore[arg-type]
    gate, up = exact.chunk(2, dim=-1)
    check(kernels.gated_linear(x, weight), gate / (1 + (-gate).exp()) * up)  # type: ignore[arg-type]
    total = (x + residual).double()
    normed, after = kernels.add_rms_norm(x, residual, scale, 1e-6)
    check(after, total)
    check(normed, total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale.double())


def test_logits_are_float32_whatever_the_weights_are() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        weight = TorchKernels().new_weight(7, 4)
    finally:
        torch.set_default_dtype(torch.float32)
    weight.rows(0, 7).fill_(1.0)
    logits = TorchKernels().logits(torch.ones(2, 4, dtype=torch.bfloat16), weight)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, torch.full((2, 7), 4.0))


@pytest.mark.parametrize(
    ("reason", "description"), [(None, "plain torch"), ("no compiler", "no native ones: no compiler")]
)
def test_it_says_why_it_was_chosen(reason: str | None, description: str) -> None:
    assert description in TorchKernels(reason).description
