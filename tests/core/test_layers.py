"""The layers of the core against their formulas, and slots as windows onto one weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanoengine.core.kernels import Kernels
from nanoengine.core.layers import Angles, Factory, Linear, RMSNorm, RotaryEmbedding, apply_rotary

# ---- linear layers


def filled(factory: Factory, *sizes: int, bias: bool) -> tuple[Linear, Tensor]:
    """A layer with one part for each output size, and the weight that it was filled with."""
    layer = Linear(factory, *sizes, bias=bias)
    weight = torch.randn(sum(sizes[1:]), sizes[0])
    names = [str(i) for i in range(len(sizes) - 1)]
    parts = layer.slots("x", *names)
    for name, rows in zip(names, weight.split(sizes[1:]), strict=True):
        parts[f"x.{name}.weight"].copy_(rows)
    if layer.bias is not None:
        layer.bias.normal_()
    return layer, weight


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_x_times_the_weight_transposed_plus_the_bias(factory: Factory, bias: bool) -> None:
    layer, weight = filled(factory, 5, 3, 4, bias=bias)
    x = torch.randn(6, 5)
    expected = x.double() @ weight.double().T
    if layer.bias is not None:
        expected = expected + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_parts_have_the_names_and_shapes_of_a_checkpoint(factory: Factory, bias: bool) -> None:
    parts = Linear(factory, 5, 6, 2, 2, bias=bias).slots("layer.attn", "q", "k", "v")
    shapes = {f"layer.attn.{name}.weight": (rows, 5) for name, rows in (("q", 6), ("k", 2), ("v", 2))}
    if bias:
        shapes |= {f"layer.attn.{name}.bias": (rows,) for name, rows in (("q", 6), ("k", 2), ("v", 2))}
    assert {name: tuple(part.shape) for name, part in parts.items()} == shapes


def test_what_is_copied_into_a_part_is_in_the_layer(factory: Factory) -> None:
    layer = Linear(factory, 5, 6, 2, 3, bias=True)
    separate = [filled(factory, 5, rows, bias=True) for rows in (6, 2, 3)]
    parts = layer.slots("x", "a", "b", "c")
    for name, (source, weight) in zip("abc", separate, strict=True):
        parts[f"x.{name}.weight"].copy_(weight)
        assert source.bias is not None
        parts[f"x.{name}.bias"].copy_(source.bias)
    x = torch.randn(4, 5)
    torch.testing.assert_close(layer(x), torch.cat([source(x) for source, _ in separate], dim=-1))


def test_a_name_too_few_is_a_mistake(factory: Factory) -> None:
    with pytest.raises(ValueError, match="zip"):
        Linear(factory, 5, 6, 2, 3).slots("x", "a", "b")


def test_one_name_is_that_of_all_rows(factory: Factory) -> None:
    layer = Linear(factory, 5, 6, 2, bias=True)
    source = torch.nn.Linear(5, 8)
    parts = layer.slots("x", "both")
    parts["x.both.weight"].copy_(source.weight.data)
    parts["x.both.bias"].copy_(source.bias.data)
    x = torch.randn(4, 5)
    torch.testing.assert_close(layer(x), source(x))


# ---- norms


def normed_by_formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def norm(factory: Factory, size: int, eps: float = 1e-6, dtype: torch.dtype = torch.float32) -> RMSNorm:
    layer = RMSNorm(replace(factory, dtype=dtype), size, eps)
    layer.weight.copy_(torch.randn(size))
    return layer


@pytest.mark.parametrize("shape", [(1, 8), (5, 8), (5, 3, 8)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_it_divides_by_the_root_mean_square_of_the_last_dimension(
    factory: Factory, shape: tuple[int, ...], eps: float
) -> None:
    layer, x = norm(factory, 8, eps), torch.randn(shape) * 5
    torch.testing.assert_close(layer(x).double(), normed_by_formula(x, layer.weight, eps), rtol=1e-5, atol=1e-5)


def test_a_row_of_zeros_stays_zero(factory: Factory) -> None:
    assert torch.equal(norm(factory, 8)(torch.zeros(2, 8)), torch.zeros(2, 8))


def check_narrow(factory: Factory, dtype: torch.dtype, tolerance: float) -> None:
    """The squares of 300 overflow float16, and 512 summands would not add up in bfloat16."""
    layer, x = norm(factory, 512, dtype=dtype), (torch.randn(4, 512) * 300).to(dtype)
    out = layer(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), normed_by_formula(x, layer.weight, 1e-6), rtol=tolerance, atol=tolerance)


def test_bfloat16_is_computed_in_float32(factory: Factory) -> None:
    check_narrow(factory, torch.bfloat16, 2e-2)


def test_float16_is_computed_in_float32() -> None:
    check_narrow(Factory(Kernels(), torch.float16, torch.device("cpu")), torch.float16, 3e-3)  # others do not take it


@pytest.mark.parametrize("has_residual", [False, True])
def test_add_and_norm_returns_the_norm_of_the_sum_and_the_sum(factory: Factory, has_residual: bool) -> None:
    layer, x, residual = norm(factory, 8), torch.randn(5, 8), torch.randn(5, 8) if has_residual else None
    expected = x.clone() if residual is None else x + residual
    normed, total = layer.add_and_norm(x, residual)
    torch.testing.assert_close(total, expected, rtol=0, atol=0)
    torch.testing.assert_close(normed.double(), normed_by_formula(expected, layer.weight, 1e-6), rtol=1e-5, atol=1e-5)


# ---- rotations


def angles_at(positions: Tensor, head_dim: int, theta: float) -> Angles:
    rotary = RotaryEmbedding(head_dim, theta, positions.device)
    rotary.prepare(int(positions.max()) + 1)
    return rotary(positions)


@pytest.mark.parametrize(("head_dim", "theta"), [(2, 1e4), (6, 1e4), (16, 1e4), (128, 1e6)])
def test_pairs_half_a_head_apart_are_rotated(head_dim: int, theta: float) -> None:
    """x[i] and x[i + half] are the parts of a complex number, turned by position * theta ** (-2 i / head_dim)."""
    x, positions, half = torch.randn(6, 3, head_dim), torch.tensor([0, 1, 2, 17, 100, 5]), head_dim // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = positions.double()[:, None] * theta ** (-torch.arange(half).double() / half)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    out = apply_rotary(x, angles_at(positions, head_dim, theta))
    torch.testing.assert_close(out.double(), torch.cat([turned.real, turned.imag], dim=-1), rtol=1e-4, atol=1e-4)


def test_angles_are_float32_and_have_room_for_the_heads() -> None:
    for part in angles_at(torch.arange(5), 16, 1e4):
        assert part.dtype == torch.float32
        assert part.shape == (5, 1, 8)
