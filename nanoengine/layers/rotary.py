"""Rotary position embedding (Su et al., RoFormer, 2021), in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]
"""Cosines and sines, each [num_tokens, 1, head_dim / 2], float32."""


class RotaryEmbedding:
    """The angles by which heads are rotated at each position. They are the same in every layer of a kind: a model looks them up
    once per step.

    Args:
        head_dim: size of a head.
        theta: base of the frequencies.
        device: where the positions will be.
    """

    table: Tensor  # [max_len, 2, head_dim / 2] float32: cosines and sines

    def __init__(self, head_dim: int, theta: float, device: torch.device):
        self.head_dim, self.theta, self.device = head_dim, theta, device

    def prepare(self, max_len: int) -> None:
        """Compute the table of positions below `max_len`; none other can be looked up. Recorded steps remember where it is."""
        exponents = torch.arange(0, self.head_dim, 2, device=self.device).to(torch.float32) / self.head_dim
        frequencies = 1.0 / self.theta**exponents  # rounded once, as checkpoints were trained: it matters far back
        positions = torch.arange(max_len, device=self.device).to(torch.float32)
        angles = positions[:, None] * frequencies
        self.table = angles.new_empty(max_len, 2, len(frequencies))  # large for a long context: nothing is there twice
        torch.cos(angles, out=self.table[:, 0])
        torch.sin(angles, out=self.table[:, 1])

    def __call__(self, positions: Tensor) -> Angles:  # [num_tokens] -> two of [num_tokens, 1, head_dim / 2]
        cos, sin = self.table.index_select(0, positions).split(1, dim=1)
        return cos, sin


def apply_rotary(x: Tensor, angles: Angles) -> Tensor:
    """Rotate the pairs (x[i], x[i + head_dim / 2]) of every head; x is [num_tokens, num_heads, head_dim]."""
    cos, sin = angles
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
