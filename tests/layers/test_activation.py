"""SwiGLU's gate against its formula."""

from __future__ import annotations

import torch

from nanoengine.layers.activation import silu_and_mul


def test_the_first_half_gates_the_second() -> None:
    x = torch.randn(5, 12) * 4
    gate, up = x[:, :6].double(), x[:, 6:].double()
    torch.testing.assert_close(silu_and_mul(x).double(), gate / (1 + (-gate).exp()) * up, rtol=1e-5, atol=1e-5)


def test_large_gates_do_not_overflow() -> None:
    out = silu_and_mul(torch.tensor([[-1e4, 1e4, 3.0, 3.0]]))
    torch.testing.assert_close(out, torch.tensor([[0.0, 3e4]]))
