"""What the kernels compute, in float64, and how far from it a result may be."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanoengine.core.randomness import GOLDEN_GAMMA, mix
from nanoengine.core.sampling import gumbel_noise
from nanoengine.kernels.operations import Kernels, Weight

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Of Triton's kernels."""

DTYPES = [torch.float32, torch.bfloat16]

ROUNDING = {torch.float32: 2.0**-23, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Largest relative error of one rounding: for float32 twice that, for two of them."""

SUMMED = 3e-6
"""Error of a sum in float32, relative to the sum of the magnitudes."""

SMALLEST = 2.0**-126
"""What is smaller may become 0; in float16 what is smaller than 2^-24, whatever it was before."""


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(x: Tensor) -> Tensor:
    """The same numbers, with other numbers between them in memory."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), float("nan") if x.is_floating_point() else -1).to(x.dtype)
    wide[..., 1::2] = x
    return wide[..., 1::2]


def weight_of(kernels: Kernels, values: Tensor) -> Weight:
    """A weight of the dtype of `values`, and where they are, filled with them."""
    weight = kernels.new_weight(values.shape[0], values.shape[1], values.dtype, values.device)
    weight.rows(0, values.shape[0]).copy_(values)
    return weight


def new_weight(kernels: Kernels, outputs: int, inputs: int, dtype: torch.dtype) -> Weight:
    return kernels.new_weight(outputs, inputs, dtype, torch.device("cpu"))


def all_rows(kernels: Kernels, weight: Weight) -> Tensor:
    """The numbers of a weight on the CPU."""
    return kernels.embed(torch.arange(weight.shape[0]), weight)


def assert_close(result: Tensor, exact: Tensor, magnitude: Tensor | float, looser: int = 1) -> None:
    """`result` is `exact`, rounded to its dtype, up to the error of a float32 sum of that magnitude."""
    assert result.shape == exact.shape
    error = (result.double() - exact).abs()
    allowed = looser * (ROUNDING[result.dtype] * exact.abs() + SUMMED * magnitude)
    allowed += 2.0**-24 if result.dtype is torch.float16 else SMALLEST
    assert (error <= allowed).all(), (
        f"{(error / allowed).nan_to_num(torch.inf).max():.3} times the error that is allowed"
    )


def assert_linear(
    result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, looser: int = 1, blur: float = 1.0
) -> None:
    """`blur`: so many times the error of a sum."""
    if looser > 1:  # what is not native may round in between
        blur *= ROUNDING.get(x.dtype, ROUNDING[result.dtype]) / SUMMED
    x, weight = x.double(), weight.double()
    exact, magnitude = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    assert_close(result, exact, blur * magnitude, looser)


def assert_norm(result: Tensor, x: Tensor, weight: Tensor, eps: float, looser: int = 1) -> None:
    x = x.double()
    exact = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    assert_close(result, exact, exact.abs(), looser)


def gated(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """The gates of `kernels/reference/gates.py`, each by its definition."""
    return _gate(gate, activation) * _passed(up, activation)


def _gate(gate: Tensor, activation: str) -> Tensor:
    if activation == "gelu_tanh":
        return gate / 2 * (1 + ((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh())
    if activation == "clamped":
        gate = gate.clamp(max=7)
        return gate * (1.702 * gate).sigmoid()
    if activation == "relu":
        return gate.relu()
    assert activation == "silu"
    return gate * gate.sigmoid()


def _passed(up: Tensor, activation: str) -> Tensor:
    return up.clamp(-7, 7) + 1 if activation == "clamped" else up


def assert_gated(
    result: Tensor, x: Tensor, weight: Tensor, activation: str = "silu", looser: int = 1, blur: float = 1.0
) -> None:
    """Between its steps there may be further roundings to the dtype; no gate is steeper than 1.13."""
    if looser > 1:
        blur *= ROUNDING[result.dtype] / SUMMED
    x, (gates, ups) = x.double(), weight.double().chunk(2)
    gate, up = x @ gates.T, x @ ups.T
    exact, slope = gated(gate, up, activation), 1.13 * _passed(up, activation).abs()
    from_gate = slope * (ROUNDING[result.dtype] * gate.abs() + blur * SUMMED * (x.abs() @ gates.abs().T))
    rounded_up = ROUNDING[result.dtype] * (up.abs() + 1) + blur * SUMMED * (x.abs() @ ups.abs().T)
    from_up = _gate(gate, activation).abs() * rounded_up
    steps = from_gate + from_up + ROUNDING[result.dtype] * exact.abs()
    assert_close(
        result, exact, steps / SUMMED + exact.abs() + 1e-30 * up.abs(), looser
    )  # below some gate the result may be 0


def assert_drawn(tokens: Tensor, logits: Tensor, keys: Tensor) -> None:
    """In each row the highest of logit + noise, up to the rounding of the noise."""
    noisy = logits.double() + gumbel_noise(keys, torch.arange(logits.shape[1])[None])
    assert tokens.dtype == torch.int64
    drawn = noisy.gather(1, tokens[:, None])[:, 0]
    assert (drawn >= noisy.amax(1) - 1e-5).all()


def position_key(seed: int, position: int) -> int:
    """The 64-bit key of the token at one position of a sequence, in whole numbers."""
    return mix(seed + (position + 1) * GOLDEN_GAMMA)
