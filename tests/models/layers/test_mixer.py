"""What layers with states have in common: filters as a checkpoint stores them."""

from __future__ import annotations

import torch

from nanoengine.models.layers.slots import taps_first


def test_filters_stand_by_taps() -> None:
    weight = torch.empty(3, 5)
    place, source = taps_first(weight), torch.randn(5, 1, 3)
    assert place.shape == source.shape
    place.copy_(source)
    assert torch.equal(weight, source[:, 0].T)
