"""GGUF files of models of transformers: transformers reads the same, in every format; damage is a named error.

That config and tensors are those of a folder is shown in tests/models/test_checkpoint.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from gguf import GGMLQuantizationType
from gguf.quants import NVFP4, dequantize, quantize
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from nanoengine.errors import InvalidWeights, UnsupportedModel
from nanoengine.kernels.quantized.ggml_blocks import GGMLBlocks
from nanoengine.models.gguf.checkpoint import GGUFCheckpoint
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.model_impl import choose_implementation
from tests.models.families import family_checkpoint
from tests.models.gguf.written import F32, write_gguf

KNOWN_TO_TRANSFORMERS = ["Llama, all biases", "Qwen2", "Qwen3, yarn", "Phi3", "Gemma2", "Gemma3"]
"""Shapes whose GGUF files transformers reads itself, with their biases."""

WIDE = {"hidden_size": 64, "intermediate_size": 96}
"""Rows of whole blocks."""

Q8_0 = GGMLQuantizationType.Q8_0
STORED = {F32: torch.float32, GGMLQuantizationType.F16: torch.float16, GGMLQuantizationType.BF16: torch.bfloat16}
"""Formats that are not computed when they are read."""


def opened(path: Path) -> GGUFCheckpoint:
    return GGUFCheckpoint(GGUFFile.open(path))


def numbers(source: Tensor | GGMLBlocks, dtype: torch.dtype = torch.float32) -> Tensor:
    return source if isinstance(source, Tensor) else source.dequantize(dtype)


@pytest.mark.parametrize("shape", KNOWN_TO_TRANSFORMERS)
def test_transformers_reads_the_same_tensors(shape: str, tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, shape, **WIDE)
    path, model = write_gguf(folder, tmp_path / "model.gguf", Q8_0), AutoModelForCausalLM.from_pretrained(folder)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    ours = dict(opened(path).tensors(torch.float32))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(numbers(ours[name]), theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.BF16, GGMLQuantizationType.F16])
@pytest.mark.parametrize("shape", ["Llama, all biases", "Mixtral"])
def test_rows_and_experts_are_found_in_every_format(shape: str, kind: GGMLQuantizationType, tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, shape, **WIDE)
    checkpoint, tensors = (
        opened(write_gguf(folder, tmp_path / "model.gguf", kind)),
        load_file(folder / "model.safetensors"),
    )
    for name, source in checkpoint.tensors(torch.bfloat16):
        found = numbers(source, torch.bfloat16)
        stored = kind if tensors[name].ndim > 1 else F32
        expected = torch.from_numpy(dequantize(quantize(tensors[name].numpy(), stored), stored))
        assert found.dtype == STORED.get(stored, torch.bfloat16)
        assert torch.equal(found, expected.to(found.dtype)), name
    dtypes = {header.dtype for header in checkpoint.headers()}
    assert dtypes == {"F32", kind.name} - {"Q4_0"}


def test_rows_that_are_not_those_of_the_heads_are_an_error(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, "Llama")
    checkpoint = opened(write_gguf(folder, tmp_path / "model.gguf", attention__head_count=3))
    with pytest.raises(InvalidWeights, match=r"64 rows in blk\.0\.attn_q\.weight, no even number for 3 heads"):
        dict(checkpoint.tensors(torch.float32))


def test_the_fingerprint_is_of_all_bytes(tmp_path: Path) -> None:
    path = write_gguf(family_checkpoint(tmp_path, "Llama"), tmp_path / "model.gguf")
    assert opened(path).fingerprint() == xxhash.xxh3_128_hexdigest(path.read_bytes())


def test_transformers_does_not_compute_a_file(tmp_path: Path) -> None:
    path = write_gguf(family_checkpoint(tmp_path, "Llama"), tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModel, match="its weights are a GGUFCheckpoint, which only families here read"):
        choose_implementation(str(path), "transformers", opened(path).config, None, ())


def test_scales_beside_matrices_in_nvfp4_multiply_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def any_blocks(_: type, blocks: Any) -> Any:  # the package has no quantizer of them
        return np.random.default_rng(0).integers(0, 127, (len(blocks), 36), dtype=np.uint8)

    monkeypatch.setattr(NVFP4, "quantize_blocks", classmethod(any_blocks))
    kind, sizes = GGMLQuantizationType.NVFP4, {"hidden_size": 128, "intermediate_size": 64, "num_local_experts": 2}
    folder = family_checkpoint(tmp_path, "Mixtral", **sizes)
    scales = {"blk.0.ffn_down_exps": [0.3, 0.7], "blk.0.attn_v": [1.7]}
    more = {f"{name}.scale": torch.tensor(values) for name, values in scales.items()}
    more |= {f"{name}.input_scale": torch.tensor(values) for name, values in scales.items()}
    plain = write_gguf(folder, tmp_path / "plain.gguf", kind)
    scaled = write_gguf(folder, tmp_path / "scaled.gguf", kind, more)
    before, after = (dict(opened(path).tensors(torch.float32)) for path in (plain, scaled))
    assert before.keys() == after.keys()
    factors = {f"model.layers.0.block_sparse_moe.experts.{i}.w2.weight": scale for i, scale in enumerate([0.3, 0.7])}
    factors["model.layers.0.self_attn.v_proj.weight"] = 1.7
    assert factors.keys() < after.keys()
    for name, source in after.items():
        exact = numbers(before[name]).double() * factors.get(name, 1.0)
        torch.testing.assert_close(numbers(source).double(), exact, rtol=2e-7, atol=0)
    more["blk.0.attn_v.scale"] = torch.ones(2)
    wrong = opened(write_gguf(folder, tmp_path / "wrong.gguf", kind, more))
    with pytest.raises(InvalidWeights, match=r"blk\.0\.attn_v\.scale .*is F32 \[2\]: it must be F32 \[1\]"):
        list(wrong.tensors(torch.float32))
