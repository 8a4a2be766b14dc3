"""Experts in one tensor, one behind the other."""

from __future__ import annotations

import torch

from nanoengine.kernels.torch_kernels import RowMajorExperts
from nanoengine.layers.stacked import StackedExperts


def test_each_matrix_goes_to_its_place() -> None:
    gate, up = (RowMajorExperts(3, 4, 5, torch.float32, torch.device("cpu")) for _ in range(2))
    place, source = StackedExperts(gate, up), torch.randn(3, 8, 5)
    assert place.shape == source.shape
    place.copy_(source)
    assert torch.equal(torch.cat((gate.tensor, up.tensor), 1), source)


def test_inputs_may_stand_before_outputs() -> None:
    gate, up = (RowMajorExperts(3, 4, 5, torch.float32, torch.device("cpu")) for _ in range(2))
    place, source = StackedExperts(gate, up, transposed=True), torch.randn(3, 5, 8)
    assert place.shape == source.shape
    place.copy_(source)
    assert torch.equal(torch.cat((gate.tensor, up.tensor), 1), source.transpose(1, 2))
