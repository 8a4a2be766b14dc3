"""RoPE of other kinds: frequencies for positions beyond the trained length, and rotation of a part of each head."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanoengine.core.layers import Angles, RotaryTable
from nanoengine.models.model_config import RopeConfig


class RotaryEmbedding(RotaryTable):
    """The angles of one kind of RoPE. The dimensions of a head must have the order of `rotary_order`."""

    def __init__(self, head_dim: int, rope: RopeConfig, device: torch.device):
        super().__init__(head_dim, rope.theta, device)
        self.rope = rope

    def frequencies(self, max_len: int) -> Tensor:
        still = self.head_dim // 2 - self.rope.rotary_dim // 2
        return torch.nn.functional.pad(frequencies(self.rope, max_len, self.device), (0, still))

    def prepare(self, max_len: int) -> None:
        super().prepare(max_len)
        if self.rope.amplitude != 1.0:
            self.table[:, :, : self.rope.rotary_dim // 2] *= self.rope.amplitude
        if self.rope.query_growth:
            self.scale = QueryScale(self.rope.query_growth, self.rope.trained_positions, self.device, first=0)
            self.scale.prepare(max_len)

    def __call__(self, positions: Tensor) -> Angles:
        angles = super().__call__(positions)
        return (*angles, *self.scale(positions)) if self.rope.query_growth else angles


def rotary_order(head_dim: int, rotary_dim: int, *, interleaved: bool = False) -> list[int]:
    """The order of the dimensions of a head with which kernels rotate whole heads, although only the first `rotary_dim` rotate.

    The partner of dimension i is i + rotary_dim / 2 in a checkpoint, or its neighbour if `interleaved`, and i + head_dim / 2
    here. Dimensions without rotation are partners of each other, with angle 0. Scores do not depend on an order that is common
    to q and k.
    """
    rotated, still = range(rotary_dim), range(rotary_dim, head_dim)
    half, middle = rotary_dim // 2, len(still) // 2
    one, other = (rotated[::2], rotated[1::2]) if interleaved else (rotated[:half], rotated[half:])
    return [*one, *still[:middle], *other, *still[middle:]]


class QueryScale(RotaryTable):
    """A factor of the queries of each token, which grows with the position: instead of angles (Llama 4), or after them
    (Ministral 3). `first`: the position of the first token.
    """

    def __init__(self, growth: float, period: int, device: torch.device, first: int = 1):
        self.growth, self.period, self.device, self.first = growth, period, device, first

    def prepare(self, max_len: int) -> None:
        """Compute each factor separately: in torch, the rounding of a logarithm may depend on the index in its vector."""
        steps = [1.0 + self.growth * math.log1p(i) for i in range(max_len // self.period + 1)]
        positions = torch.arange(max_len, dtype=torch.int64, device=self.device) + self.first
        self.table = torch.tensor(steps, dtype=torch.float32, device=self.device)[positions // self.period, None]

    def __call__(self, positions: Tensor) -> Angles:
        return (self.table.index_select(0, positions),)


def frequencies(rope: RopeConfig, max_len: int, device: torch.device) -> Tensor:
    """Radians per position of each pair: [rotary_dim / 2] float32, rounded as in training, which matters at large
    distances.

    The kinds "dynamic" and "longrope" depend on `max_len`, the limit of all sequences: all sequences have the same frequencies,
    so that cached K/V stay valid.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32, device=device) / rope.rotary_dim
    plain = 1.0 / rope.theta**exponents
    if rope.num_pairs is not None:
        plain[rope.num_pairs :] = 0.0
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
    """Low frequencies divided by the factor, high ones unchanged, and a blend between (Llama 3.1)."""
    wavelengths = 2 * math.pi / plain
    slow, fast = rope.trained_positions / rope.low_freq_factor, rope.trained_positions / rope.high_freq_factor
    width = rope.high_freq_factor - rope.low_freq_factor  # 0: none are mixed
    blend = (rope.trained_positions / wavelengths - rope.low_freq_factor) / (width or 1.0)
    mixed = (1 - blend) * plain / rope.factor + blend * plain
    return torch.where(wavelengths > slow, plain / rope.factor, torch.where(wavelengths < fast, plain, mixed))


def _yarn(rope: RopeConfig, exponents: Tensor) -> Tensor:
    """YaRN (Peng et al., 2023): pairs with many turns in the trained length have their frequency, others a lower one."""
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
    unchanged = 1 - slowed
    return 1.0 / (rope.factor * wavelengths) * (1 - unchanged) + 1.0 / wavelengths * unchanged
