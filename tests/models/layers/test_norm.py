"""Norms with an offset, and none, against what they stand for."""

from __future__ import annotations

import torch

from nanoengine.core.layers import Linear
from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.norm import NoNorm, OffsetNorm


def linear(factory: Factory, *outputs: int) -> Linear:
    layer = Linear(factory, 5, *outputs)
    for slot in layer.slots("x", *(str(i) for i in range(len(outputs)))).values():
        slot.copy_(torch.randn(slot.shape))
    return layer


def test_the_offset_is_added_as_the_weight_is_loaded(factory: Factory) -> None:
    norm, source = OffsetNorm(factory, 4, 1e-6, 1.0), torch.randn(4)
    norm.slot().copy_(source)
    assert torch.equal(norm.weight, source + 1)


def test_without_an_offset_the_slot_is_the_weight(factory: Factory) -> None:
    norm = OffsetNorm(factory, 4, 1e-6, 0.0)
    assert norm.slot() is norm.weight


def test_no_norm_adds_the_residual_and_that_is_all(factory: Factory) -> None:
    norm, x, residual = NoNorm(factory), torch.randn(3, 5), torch.randn(3, 5)
    layer = linear(factory, 7)
    assert norm(x) is x
    for given, total in ((None, x), (residual, x + residual)):
        out, carried = norm.then_linear(x, given, layer)
        assert torch.equal(out, layer(total))
        assert torch.equal(carried, total)
