"""Slots that change what a checkpoint has: each number arrives where it belongs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanoengine.kernels.operations import ExpertWeights, QuantizedSlot
from nanoengine.kernels.reference.operations import RowMajor
from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.slots import (
    InterleavedColumns,
    InterleavedExperts,
    Reordered,
    StackedExperts,
    dense,
    shifted,
    taps_first,
)


def new_experts(experts: int, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    return ExpertWeights(RowMajor(experts * outputs, inputs, dtype, torch.device("cpu")), experts)


def matrices(weights: ExpertWeights) -> Tensor:
    assert isinstance(weights.weight, RowMajor)
    return weights.weight.tensor.view(weights.shape)


def test_dense_rows_go_where_they_belong_and_nothing_quantized_is_taken(factory: Factory) -> None:
    weight, source = factory.weight(32, 6), torch.randn(4, 32)
    weight.rows(0, 6).copy_(torch.zeros(6, 32))
    assert isinstance(weight.rows(1, 4), QuantizedSlot)
    slot = dense(weight.rows(1, 4))
    assert slot.shape == (4, 32)
    assert not isinstance(slot, QuantizedSlot)
    slot.copy_(source)
    found = factory.kernels.embed(torch.arange(6), weight)
    assert torch.equal(found[1:5], source)
    assert not found[[0, 5]].any()


def test_the_sum_is_float32_whatever_is_stored() -> None:
    place, source = torch.empty(5), (torch.randn(5) * 1e-3).bfloat16()
    slot = shifted(place, 1.0)
    assert slot.shape == place.shape
    slot.copy_(source)
    assert torch.equal(place, source.float() + 1)


def test_row_i_of_a_group_is_the_row_that_the_order_names() -> None:
    place, source = torch.zeros(9, 2), torch.arange(18.0).view(9, 2)
    Reordered(place, [2, 0, 1], 2).copy_(source)
    assert Reordered(place[1:3], [1, 0], 1).shape == (2, 2)
    vector = torch.zeros(4)
    Reordered(vector, [1, 0], 2).copy_(torch.arange(4.0))
    assert vector.tolist() == [1, 0, 3, 2]
    assert torch.equal(place, source[[2, 0, 1, 5, 3, 4, 6, 7, 8]])


def test_every_second_output_of_an_expert_is_of_the_second_weight() -> None:
    gate, up = (new_experts(3, 4, 5) for _ in range(2))
    place, source = InterleavedExperts(gate, up), torch.randn(3, 5, 8)
    assert place.shape == source.shape
    place.copy_(source)
    x = torch.randn(5)
    for expert in range(3):
        outputs = x @ source[expert]
        torch.testing.assert_close(matrices(gate)[expert] @ x, outputs[::2])
        torch.testing.assert_close(matrices(up)[expert] @ x, outputs[1::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 5), (70, 66)])
def test_every_bit_of_interleaved_experts_arrives(dtype: torch.dtype, count: int, outputs: int, inputs: int) -> None:
    """Whatever the bits are: NaN of all kinds and -0 among them."""
    whole = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    limits = torch.iinfo(whole)
    bits = torch.randint(limits.min, limits.max, (2, inputs, count * outputs), dtype=whole)
    weights = [new_experts(2, outputs, inputs, dtype) for _ in range(count)]
    InterleavedExperts(*weights).copy_(bits.view(dtype))
    for first, weight in enumerate(weights):
        assert torch.equal(matrices(weight).view(whole), bits[..., first::count].transpose(1, 2))


def test_every_second_column_is_of_the_second_place() -> None:
    first, second = torch.empty(2, 3), torch.empty(2, 3)
    place = InterleavedColumns((first, second))
    assert place.shape == (2, 6)
    place.copy_(torch.arange(12.0).view(2, 6))
    assert first.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert second.tolist() == [[1, 3, 5], [7, 9, 11]]


@pytest.mark.parametrize("transposed", [False, True])
def test_each_matrix_of_stacked_experts_goes_to_its_place_also_where_inputs_stand_before_outputs(
    transposed: bool,
) -> None:
    gate, up = (new_experts(3, 4, 5) for _ in range(2))
    place, source = StackedExperts(gate, up, transposed=transposed), torch.randn(3, 8, 5)
    stored = source.transpose(1, 2) if transposed else source
    assert place.shape == stored.shape
    place.copy_(stored)
    assert torch.equal(torch.cat((matrices(gate), matrices(up)), 1), source)


def test_filters_stand_by_taps() -> None:
    weight = torch.empty(3, 5)
    place, source = taps_first(weight), torch.randn(5, 1, 3)
    assert place.shape == source.shape
    place.copy_(source)
    assert torch.equal(weight, source[:, 0].T)
