"""Rotary position embedding (Su et al., RoFormer, 2021), in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]
"""Cosines and sines, each [num_tokens, 1, head_dim / 2]."""


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> Angles:
    """Cosine and sine of the angles of each position: two of [num_tokens, 1, head_dim / 2], float32.

    They are the same in every layer, so a model computes them once per step.
    """
    angles = positions.float()[:, None, None] * _frequencies(head_dim, theta, positions.device)
    return angles.cos(), angles.sin()


@lru_cache(maxsize=8)
def _frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    return 1.0 / theta**exponents  # rounded once, as checkpoints were trained: it matters at large positions


def apply_rotary(x: Tensor, angles: Angles) -> Tensor:
    """Rotate the pairs (x[i], x[i + head_dim / 2]) of every head; x is [num_tokens, num_heads, head_dim]."""
    cos, sin = angles
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
