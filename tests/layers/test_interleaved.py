"""Tensors whose last dimension belongs to several places in turn."""

from __future__ import annotations

import pytest
import torch

from nanoengine.kernels.torch_kernels import RowMajorExperts
from nanoengine.layers.interleaved import InterleavedColumns, InterleavedExperts


def test_every_second_output_of_an_expert_is_of_the_second_weight() -> None:
    gate, up = (RowMajorExperts(3, 4, 5, torch.float32, torch.device("cpu")) for _ in range(2))
    place, source = InterleavedExperts(gate, up), torch.randn(3, 5, 8)
    assert place.shape == source.shape
    place.copy_(source)
    x = torch.randn(5)
    for expert in range(3):
        outputs = x @ source[expert]
        torch.testing.assert_close(gate.tensor[expert] @ x, outputs[::2])
        torch.testing.assert_close(up.tensor[expert] @ x, outputs[1::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 5), (70, 66)])
def test_every_bit_arrives(dtype: torch.dtype, count: int, outputs: int, inputs: int) -> None:
    """Whatever the bits are: NaN of all kinds and -0 among them."""
    whole = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    limits = torch.iinfo(whole)
    bits = torch.randint(limits.min, limits.max, (2, inputs, count * outputs), dtype=whole)
    weights = [RowMajorExperts(2, outputs, inputs, dtype, torch.device("cpu")) for _ in range(count)]
    InterleavedExperts(*weights).copy_(bits.view(dtype))
    for first, weight in enumerate(weights):
        assert torch.equal(weight.tensor.view(whole), bits[..., first::count].transpose(1, 2))


def test_of_columns_too() -> None:
    first, second = torch.empty(2, 3), torch.empty(2, 3)
    place = InterleavedColumns((first, second))
    assert place.shape == (2, 6)
    place.copy_(torch.arange(12.0).view(2, 6))
    assert first.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert second.tolist() == [[1, 3, 5], [7, 9, 11]]
