"""A weight slot that takes no quantized rows, whatever is behind it."""

from __future__ import annotations

import torch

from nanoengine.kernels.interface import QuantizedSlot
from nanoengine.layers.dense_slot import DenseSlot
from nanoengine.layers.factory import Factory


def test_dense_rows_go_where_they_belong_and_nothing_quantized_is_taken(factory: Factory) -> None:
    weight, source = factory.weight(32, 6), torch.randn(4, 32)
    weight.rows(0, 6).copy_(torch.zeros(6, 32))
    assert isinstance(weight.rows(1, 4), QuantizedSlot)
    slot = DenseSlot(weight.rows(1, 4))
    assert slot.shape == (4, 32)
    assert not isinstance(slot, QuantizedSlot)
    slot.copy_(source)
    found = factory.kernels.embed(torch.arange(6), weight)
    assert torch.equal(found[1:5], source)
    assert not found[[0, 5]].any()
