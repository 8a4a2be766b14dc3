"""A place whose rows stand in another order than those of what is copied to it."""

from __future__ import annotations

import torch

from nanoengine.layers.reordered import Reordered


def test_row_i_is_the_row_that_the_order_names() -> None:
    place, source = torch.zeros(4, 3), torch.arange(12.0).view(4, 3)
    Reordered(place, [2, 0, 3, 1]).copy_(source)
    assert torch.equal(place, source[[2, 0, 3, 1]])


def test_it_has_the_shape_of_the_place() -> None:
    place = torch.zeros(4, 3)
    assert Reordered(place[1:3], [1, 0]).shape == (2, 3)
