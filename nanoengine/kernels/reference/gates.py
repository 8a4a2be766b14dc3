"""How one half of a gated product changes the other: SwiGLU and GeGLU (Shazeer, "GLU Variants Improve Transformer", 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def _silu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def _relu(gate: Tensor, up: Tensor) -> Tensor:
    return F.relu(gate) * up


GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "clamped": _clamped,
    "relu": _relu,
}
"""Activation -> (gate, up) to their product.

silu: gate * sigmoid(gate) * up. gelu_tanh: GELU by its approximation with tanh (Hendrycks and Gimpel, 2016), of Gemma. clamped:
gate * sigmoid(1.702 gate) * (up + 1), with gate clamped to at most 7 and up to [-7, 7], of gpt-oss. relu: relu(gate) * up, which
is the square of relu where both are the same.

Kernels number them in this order. Both of the first are gate * sigmoid(t) * up: 1 + tanh(y) is 2 sigmoid(2 y).
"""

ACTIVATIONS = tuple(GATES)


def gated(both: Tensor, activation: str) -> Tensor:
    """[..., 2 * width], the gate and then what it changes, to [..., width]."""
    gate, up = both.chunk(2, dim=-1)
    return GATES[activation](gate, up)
