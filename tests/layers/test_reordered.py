"""A place whose rows stand in another order than those of what is copied to it."""

from __future__ import annotations

import torch

from nanoengine.layers.reordered import Reordered


def test_row_i_of_a_group_is_the_row_that_the_order_names() -> None:
    place, source = torch.zeros(9, 2), torch.arange(18.0).view(9, 2)
    Reordered(place, [2, 0, 1], 2).copy_(source)
    assert Reordered(place[1:3], [1, 0], 1).shape == (2, 2)
    vector = torch.zeros(4)
    Reordered(vector, [1, 0], 2).copy_(torch.arange(4.0))
    assert vector.tolist() == [1, 0, 3, 2]
    assert torch.equal(place, source[[2, 0, 1, 5, 3, 4, 6, 7, 8]])
