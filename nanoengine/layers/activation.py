"""SwiGLU's gate (Shazeer, 2020)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for [num_tokens, 2 * size] with the gate in the first half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
