"""Rotary position embedding (Su et al., RoFormer, 2021), in the half-split layout of Hugging Face checkpoints; and how its
frequencies change for positions beyond those that a model was trained on.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanoengine.model_config import RopeConfig

Angles = tuple[Tensor, Tensor]
"""Cosines and sines, each [num_tokens, 1, head_dim / 2], float32."""


class RotaryEmbedding:
    """The angles by which heads are rotated at each position. They are the same in every layer of a kind: a model looks them up
    once per step.

    Args:
        head_dim: size of a head.
        rope: which of its dimensions rotate, and how fast. A head's dimensions must stand in `rotary_order`.
        device: where the positions will be.
    """

    table: Tensor  # [max_len, 2, head_dim / 2] float32: cosines and sines

    def __init__(self, head_dim: int, rope: RopeConfig, device: torch.device):
        self.head_dim, self.rope, self.device = head_dim, rope, device

    def prepare(self, max_len: int) -> None:
        """Compute the table of positions below `max_len`; none other can be looked up. Recorded steps remember where it is."""
        rotated = self.rope.rotary_dim // 2
        positions = torch.arange(max_len, device=self.device).to(torch.float32)
        angles = positions[:, None] * frequencies(self.rope, max_len, self.device)
        self.table = angles.new_empty(
            max_len, 2, self.head_dim // 2
        )  # large for a long context: nothing is there twice
        torch.cos(angles, out=self.table[:, 0, :rotated])
        torch.sin(angles, out=self.table[:, 1, :rotated])
        if self.rope.amplitude != 1.0:
            self.table[:, :, :rotated] *= self.rope.amplitude
        self.table[:, 0, rotated:], self.table[:, 1, rotated:] = 1.0, 0.0

    def __call__(self, positions: Tensor) -> Angles:  # [num_tokens] -> two of [num_tokens, 1, head_dim / 2]
        cos, sin = self.table.index_select(0, positions).split(1, dim=1)
        return cos, sin


def apply_rotary(x: Tensor, angles: Angles) -> Tensor:
    """Rotate the pairs (x[i], x[i + head_dim / 2]) of every head; x is [num_tokens, num_heads, head_dim]."""
    cos, sin = angles
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotary_order(head_dim: int, rotary_dim: int) -> list[int]:
    """In which order a head's dimensions must stand, so that whole heads can be rotated though only the first `rotary_dim` are.

    The partner of dimension i is i + rotary_dim / 2 in a checkpoint, and i + head_dim / 2 here. Those that do not rotate are
    partners of each other, with an angle of zero. Scores do not depend on the order, if q and k agree on it.
    """
    half = rotary_dim // 2
    still = list(range(rotary_dim, head_dim))
    first, second = still[: len(still) // 2], still[len(still) // 2 :]
    return [*range(half), *first, *range(half, rotary_dim), *second]


def frequencies(rope: RopeConfig, max_len: int, device: torch.device) -> Tensor:
    """Radians per position of each pair: [rotary_dim / 2] float32, rounded as checkpoints were trained: it matters far back.

    Those of the kinds "dynamic" and "longrope" depend on `max_len`, the longest sequence that there will be: they are the same
    for every sequence, so that K/V that are cached stay right.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, device=device).to(torch.float32) / rope.rotary_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":  # position interpolation: Chen et al., 2023
        return plain / rope.factor
    if rope.kind == "dynamic":
        return 1.0 / _stretched_theta(rope, max_len) ** exponents
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, exponents)
    if rope.kind in ("longrope", "factors"):  # LongRoPE: Ding et al., 2024
        is_long = rope.kind == "factors" or max_len > rope.trained_positions
        factors = torch.tensor(rope.long_factors if is_long else rope.short_factors, dtype=torch.float32, device=device)
        return 1.0 / (factors * rope.theta**exponents)
    assert rope.kind == "default"
    return plain


def _stretched_theta(rope: RopeConfig, max_len: int) -> float:
    """Dynamic NTK scaling: a larger base, if there are more positions than trained."""
    dim, trained = rope.rotary_dim, rope.trained_positions
    stretch = rope.factor * max(max_len, trained) / trained - (rope.factor - 1)
    return rope.theta * stretch ** (dim / (dim - 2)) if dim > 2 else rope.theta


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Slow frequencies are divided by the factor, fast ones left, and those between mixed (Llama 3.1)."""
    wavelengths = 2 * math.pi / plain
    slow, fast = rope.trained_positions / rope.low_freq_factor, rope.trained_positions / rope.high_freq_factor
    share = (rope.trained_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - share) * plain / rope.factor + share * plain
    return torch.where(wavelengths > slow, plain / rope.factor, torch.where(wavelengths < fast, plain, mixed))


def _yarn(rope: RopeConfig, exponents: Tensor) -> Tensor:
    """YaRN (Peng et al., 2023): pairs that turn often within what was trained keep their frequency, others slow down."""
    dim = rope.rotary_dim

    def pair_that_turns(times: float) -> float:
        return dim * math.log(rope.trained_positions / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(dim // 2, dtype=torch.float32, device=exponents.device)
    slowed = ((pairs - low) / (high - low)).clamp(0, 1)
    wavelengths = rope.theta**exponents
    kept = 1 - slowed
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
