"""Experts in MXFP4: their numbers are those of transformers, and what is wrong in a folder is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanoengine.errors import InvalidWeights
from nanoengine.models.checkpoint import TensorHeader
from nanoengine.models.quantization.mxfp4_folder import Mxfp4Experts, Mxfp4Folder


def folder_of(path: Path, **tensors: Tensor) -> Mxfp4Folder:
    save_file(tensors, path / "model.safetensors")
    return Mxfp4Folder(path)


def test_every_number_under_every_scale_is_that_of_transformers(tmp_path: Path) -> None:
    blocks = torch.randint(0, 256, (2, 6, 8, 16), dtype=torch.uint8)
    blocks[0, :, 0] = torch.arange(96, dtype=torch.uint8).view(6, 16) * 17
    scales = (
        torch.randperm(250).to(torch.uint8)[:96].view(2, 6, 8)
    )  # above, the largest numbers are infinite in float32
    bias = torch.randn(3).bfloat16()
    checkpoint = folder_of(tmp_path, down_proj_blocks=blocks, down_proj_scales=scales, bias=bias)
    found = dict(checkpoint.tensors(torch.float32))
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    experts = found["down_proj"]
    assert isinstance(experts, Mxfp4Experts)
    assert torch.equal(experts.dequantize(torch.float32), expected)
    assert found.keys() == {"down_proj", "bias"}
    assert list(checkpoint.headers()) == [
        TensorHeader("bias", "BF16", [3], "model.safetensors"),
        TensorHeader("down_proj", "BF16", [2, 256, 6], "model.safetensors", 2 * 6 * 8 * 18),
    ]


BLOCKS, SCALES = torch.zeros(2, 6, 8, 16, dtype=torch.uint8), torch.zeros(2, 6, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x_blocks": BLOCKS}, "x_scales is missing .* beside x_blocks"),
        ({"x_blocks": BLOCKS, "x_scales": SCALES[:1]}, r"x_blocks .* is U8 \[2, 6, 8, 16\]: blocks must be U8"),
        (
            {"x_blocks": BLOCKS[..., :8].clone(), "x_scales": SCALES},
            r"x_blocks .* is U8 \[2, 6, 8, 8\]: blocks must be U8",
        ),
        ({"x_blocks": BLOCKS, "x_scales": SCALES.float()}, r"x_scales .* is F32 \[2, 6, 8\]: blocks must be U8"),
        (
            {"x_blocks": BLOCKS[0].clone(), "x_scales": SCALES[0].clone()},
            r"x_blocks .* is U8 \[6, 8, 16\]: blocks must be U8",
        ),
    ],
)
def test_blocks_and_scales_that_do_not_match_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(InvalidWeights, match=message):
        list(folder_of(tmp_path, **tensors).headers())
