"""Rotary embeddings against rotations of complex numbers."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanoengine.core.layers import Angles, apply_rotary
from nanoengine.models.layers.rotary import QueryScale, RotaryEmbedding, rotary_order
from nanoengine.models.model_config import RopeConfig
from tests.support import angles_at, threads


def test_angles_are_float32_whatever_torchs_default_dtype() -> None:
    expected = angles_at(torch.tensor([30_000]), 128, 1e6)
    torch.set_default_dtype(torch.bfloat16)
    try:
        angles = angles_at(torch.tensor([30_000]), 128, 1e6)
    finally:
        torch.set_default_dtype(torch.float32)
    for part, right in zip(angles, expected, strict=True):
        assert torch.equal(part, right)


@pytest.mark.parametrize("kind", ["default", "dynamic"])
@pytest.mark.parametrize("count", [1, 2])
def test_an_angle_depends_on_its_position_alone(count: int, kind: str) -> None:
    """Not on the longest length that there is room for, nor on the threads that fill the table."""
    rope = RopeConfig(theta=1e6, rotary_dim=128, kind=kind, factor=4.0, trained_positions=40_001)

    def table(max_len: int) -> Angles:
        rotary = RotaryEmbedding(128, rope, torch.device("cpu"))
        rotary.prepare(max_len)
        return rotary(torch.arange(777))

    with threads(1):
        right = table(777)
    with threads(count):
        for max_len in (800, 4096, 40_001):
            assert all(torch.equal(a, b) for a, b in zip(table(max_len), right, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_rounded_once_at_the_end(dtype: torch.dtype) -> None:
    x, positions = torch.randn(4, 2, 16).to(dtype), torch.tensor([0, 3, 999, 40_000])
    angles = angles_at(positions, 16, 1e6)
    assert torch.equal(apply_rotary(x, angles), apply_rotary(x.float(), angles).to(dtype))


def test_nothing_is_computed_before_the_length_is_known() -> None:
    """Models are built on the meta device to look at their shapes: arithmetic there would import half of torch's compiler."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, operation: object, *_: object) -> None:
            raise AssertionError(f"{operation} is computed")

    with Seen():
        RotaryEmbedding(128, RopeConfig(theta=1e6, rotary_dim=128), torch.device("meta"))


@pytest.mark.parametrize("rotary_dim", [12, 8])
def test_pairs_beside_each_other_are_those_of_complex_numbers(rotary_dim: int) -> None:
    """In another order: what is not rotated stays, and scores do not depend on the order."""
    x, positions, size = torch.randn(6, 3, 12), torch.tensor([0, 1, 2, 17, 100, 5]), 12
    rotary = RotaryEmbedding(size, RopeConfig(theta=1e4, rotary_dim=rotary_dim), torch.device("cpu"))
    rotary.prepare(101)
    order = rotary_order(size, rotary_dim, interleaved=True)
    out = torch.empty_like(x)
    out[..., order] = apply_rotary(x[..., order], rotary(positions))
    pairs = torch.view_as_complex(x[..., :rotary_dim].double().unflatten(-1, (-1, 2)).contiguous())
    angles = positions.double()[:, None] * 1e4 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)
    torch.testing.assert_close(out[..., :rotary_dim].double(), turned, rtol=1e-4, atol=1e-4)
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


def test_queries_grow_in_steps() -> None:
    scale = QueryScale(0.1, 10, torch.device("cpu"))
    scale.prepare(2000)
    positions = torch.tensor([0, 8, 9, 18, 19, 1999])
    expected = 1 + 0.1 * torch.log1p(torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 200.0]))
    for factors in scale(positions):
        torch.testing.assert_close(factors[:, 0], expected)
