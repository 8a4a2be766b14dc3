"""Numbers with a constant added as they are loaded."""

from __future__ import annotations

import torch

from nanoengine.layers.shifted import Shifted


def test_the_sum_is_float32_whatever_is_stored() -> None:
    place, source = torch.empty(5), (torch.randn(5) * 1e-3).bfloat16()
    shifted = Shifted(place, 1.0)
    assert shifted.shape == place.shape
    shifted.copy_(source)
    assert torch.equal(place, source.float() + 1)
