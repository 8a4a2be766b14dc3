"""The layers of the core against their formulas, and slots as windows onto one weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanoengine.core.kernels import CoreKernels
from nanoengine.core.layers import Angles, Linear, RMSNorm, RotaryTable, WeightFactory, apply_rotary

# ---- linear layers


def filled(layer: Linear, **sizes: int) -> tuple[Tensor, Tensor]:
    """Fill a layer of such parts as a checkpoint does; returns weight and bias of all its rows."""
    weight, bias = torch.randn(sum(sizes.values()), 5), torch.randn(sum(sizes.values()))
    parts = layer.slots("layer.attn", *sizes)
    kinds = {"weight": weight, "bias": bias} if layer.bias is not None else {"weight": weight}
    assert parts.keys() == {f"layer.attn.{name}.{kind}" for name in sizes for kind in kinds}
    for kind, whole in kinds.items():
        for name, rows in zip(sizes, whole.split([*sizes.values()]), strict=True):
            assert parts[f"layer.attn.{name}.{kind}"].shape == rows.shape
            parts[f"layer.attn.{name}.{kind}"].copy_(rows)
    return weight, bias * (layer.bias is not None)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("names", [{"q": 6, "k": 2, "v": 3}, {"both": 11}], ids=["parts", "one name for all rows"])
def test_it_is_x_times_the_weight_transposed_plus_the_bias(
    factory: WeightFactory, bias: bool, names: dict[str, int]
) -> None:
    layer, x = Linear(factory, 5, 6, 2, 3, bias=bias), torch.randn(6, 5)
    weight, shift = filled(layer, **names)
    expected = x.double() @ weight.double().T + shift.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)


# ---- norms


def normed_by_formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def norm(factory: WeightFactory, size: int, dtype: torch.dtype = torch.float32) -> RMSNorm:
    layer = RMSNorm(replace(factory, dtype=dtype), size, 1e-6)
    layer.weight.copy_(torch.randn(size))
    return layer


def test_narrow_dtypes_are_computed_in_float32(factory: WeightFactory) -> None:
    """The squares of 300 overflow float16, and 512 summands would not add up in bfloat16. A row of zeros stays zero."""
    core = WeightFactory(CoreKernels(), torch.float16, torch.device("cpu"))  # others do not take float16
    for made, dtype, tolerance in ((factory, torch.bfloat16, 2e-2), (core, torch.float16, 3e-3)):
        layer, x = norm(made, 512, dtype=dtype), (torch.randn(4, 512) * 300).to(dtype)
        x[1] = 0
        out, expected = layer(x), normed_by_formula(x, layer.weight, 1e-6)
        assert out.dtype == dtype
        assert not out[1].any()
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("has_residual", [False, True])
def test_add_and_norm_returns_the_norm_of_the_sum_and_the_sum(factory: WeightFactory, has_residual: bool) -> None:
    layer, x, residual = norm(factory, 8), torch.randn(5, 8), torch.randn(5, 8) if has_residual else None
    expected = x.clone() if residual is None else x + residual
    normed, total = layer.add_and_norm(x, residual)
    torch.testing.assert_close(total, expected, rtol=0, atol=0)
    torch.testing.assert_close(normed.double(), normed_by_formula(expected, layer.weight, 1e-6), rtol=1e-5, atol=1e-5)


# ---- rotations


def angles_at(positions: Tensor, head_dim: int, theta: float) -> Angles:
    rotary = RotaryTable(head_dim, theta, positions.device)
    rotary.prepare(int(positions.max()) + 1)
    return rotary(positions)


@pytest.mark.parametrize(("head_dim", "theta"), [(2, 1e4), (6, 1e4), (16, 1e4), (128, 1e6)])
def test_pairs_half_a_head_apart_are_rotated(head_dim: int, theta: float) -> None:
    """x[i] and x[i + half] are the parts of a complex number, turned by position * theta ** (-2 i / head_dim)."""
    x, positions, half = torch.randn(6, 3, head_dim), torch.tensor([0, 1, 2, 17, 100, 5]), head_dim // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = positions.double()[:, None] * theta ** (-torch.arange(half).double() / half)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    found = angles_at(positions, head_dim, theta)
    assert {(part.dtype, part.shape) for part in found} == {(torch.float32, (6, 1, half))}
    out = apply_rotary(x, found)
    torch.testing.assert_close(out.double(), torch.cat([turned.real, turned.imag], dim=-1), rtol=1e-4, atol=1e-4)
