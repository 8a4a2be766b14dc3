"""What of a checkpoint a rank takes: its rows, and nothing is copied of the others."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.block_encoder import encode
from nanoengine.kernels.quantized.ggml_blocks import GGMLBlocks
from nanoengine.kernels.reference.operations import RowMajor
from nanoengine.models.safetensors_folder import SafetensorsFolder
from nanoengine.scale.parallel.weights import PartialWeight

CPU = torch.device("cpu")
ROWS, INPUTS = 24, 256
RANGES = [range(4, 10), range(16, 24)]


def part() -> tuple[PartialWeight, RowMajor]:
    own = RowMajor(14, INPUTS, torch.float32, CPU)
    return PartialWeight(own, (ROWS, INPUTS), RANGES, None), own


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
