"""What of a checkpoint a rank takes: its rows, and nothing is copied of the others."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.block_encoder import encode
from nanoengine.kernels.operations import ExpertWeights
from nanoengine.kernels.quantized.ggml_blocks import GGMLBlocks
from nanoengine.kernels.reference.operations import RowMajor
from nanoengine.models.quantization.at_load import quantizer
from nanoengine.models.safetensors_folder import SafetensorsFolder
from nanoengine.scale.parallel.weights import PartialExperts, PartialWeight, PartOfRows

CPU = torch.device("cpu")
ROWS, INPUTS = 24, 256
RANGES = [range(4, 10), range(16, 24)]


def part() -> tuple[PartialWeight, RowMajor]:
    own = RowMajor(14, INPUTS, torch.float32, CPU)
    return PartialWeight(own, (ROWS, INPUTS), RANGES, None), own


@pytest.mark.parametrize("cuts", [(0, 24), (0, 12, 24), (0, 4, 10, 16, 24), (0, 7, 8, 20, 24)])
def test_projections_that_a_file_has_together_or_apart(cuts: tuple[int, ...]) -> None:
    source = torch.randn(ROWS, INPUTS)
    weight, own = part()
    for first, last in pairwise(cuts):
        place = weight.rows(first, last - first)
        assert place.shape == (last - first, INPUTS)
        place.copy_(source[first:last])
    assert torch.equal(own.tensor, source[[*RANGES[0], *RANGES[1]]])


def test_quantized_rows_are_those_of_the_whole() -> None:
    source = torch.randn(ROWS, INPUTS)
    for quantized in (quantizer("int8")(source), quantizer("int4")(source), encode(source, "Q4_K")):
        weight, own = part()
        weight.rows(0, ROWS).copy_quantized(quantized)
        assert torch.equal(own.tensor, quantized.dequantize(torch.float32)[[*RANGES[0], *RANGES[1]]])


def test_parts_of_a_file_are_views_of_what_is_mapped(tmp_path: Path) -> None:
    """So that only their pages are ever read."""
    save_file({"layers.0.x": torch.randn(ROWS, INPUTS)}, tmp_path / "model.safetensors")
    weight, _ = part()
    for _, tensor in SafetensorsFolder(tmp_path).tensors():
        found = list(weight.rows(0, ROWS).parts(tensor))
        for (piece, _), rows in zip(found, RANGES, strict=True):
            assert isinstance(piece, torch.Tensor)
            assert piece.data_ptr() == tensor[rows.start].data_ptr()
    blocks = encode(torch.randn(ROWS, INPUTS), "Q4_K")
    assert isinstance(blocks, GGMLBlocks)
    for (piece, _), rows in zip(weight.rows(0, ROWS).parts(blocks), RANGES, strict=True):
        assert isinstance(piece, GGMLBlocks)
        assert piece.data.data_ptr() == blocks.data[rows.start].data_ptr()


def test_a_bias_is_cut_like_its_weight_and_once() -> None:
    weight, _ = part()
    bias = torch.arange(ROWS)
    found = weight.bias(bias)
    assert found is not None
    assert found.tolist() == [*RANGES[0], *RANGES[1]]
    assert weight.bias(bias) is found
    assert weight.bias(None) is None


def test_experts_are_cut_by_their_outputs() -> None:
    columns = [range(3), range(3, 8)]
    own = RowMajor(2 * 5, INPUTS, torch.float32, CPU)
    experts, sources = PartialExperts(ExpertWeights(own, 2), (2, 8, INPUTS), columns, 1), torch.randn(2, 8, INPUTS)
    for number in range(2):
        place = experts.expert(number)
        assert isinstance(place, PartOfRows)
        place.copy_(sources[number])
    assert torch.equal(own.tensor, sources[:, 3:].flatten(0, 1))
    assert experts.bias(torch.arange(16).view(2, 8)).tolist() == [[3, 4, 5, 6, 7], [11, 12, 13, 14, 15]]
