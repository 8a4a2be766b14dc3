"""Folders with quantized weights, of architectures that transformers' modules compute: the dequantized weights are loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.architectures.checkpoints import make
from nanoengine import LLM, SamplingParams
from tests.models.quantization.packed_models import FORMS

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=3)
PROMPTS = [[3, 5, 7, 11, 13], list(range(20, 60))]


def quantized(folder: Path, form: str) -> tuple[Path, Path]:
    """The model of a folder, with its matrices of layers in a form, and as the numbers that these stand for."""
    torch.manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    packed, dense = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight") or tensor.dim() != 2 or any(size % 32 for size in tensor.shape):
            continue
        parts, numbers = FORMS[form].make(*tensor.shape)
        del packed[name]
        packed |= {f"{name.removesuffix('weight')}{suffix}": part.clone() for suffix, part in parts.items()}
        dense[name] = numbers
    table = json.loads((folder / "config.json").read_text())
    folders = folder.with_name("packed"), folder.with_name("dense")
    for target, content, more in zip(
        folders, (packed, dense), ({"quantization_config": FORMS[form].config}, {}), strict=True
    ):
        shutil.copytree(folder, target)
        save_file(content, target / "model.safetensors")
        (target / "config.json").write_text(json.dumps(table | more))
    return folders


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("DeepseekV3ForCausalLM", "fp8, blocks"),
        ("DeepseekV3ForCausalLM", "packed"),
        ("Olmo3ForCausalLM", "AWQ"),
        ("StableLmForCausalLM", "GPTQ, 8 bits"),
    ],
)
def test_dequantized_weights_are_loaded(tmp_path: Path, name: str, form: str) -> None:
    make(name, tmp_path / "model")
    found = []
    for folder in quantized(tmp_path / "model", form):
        options = {
            "device": "cpu",
            "dtype": "float32",
            "activation_dtype": "float32",
            "num_kv_blocks": 100,
            "max_model_len": 128,
        }
        with LLM(str(folder), use_tqdm=False, model_impl="transformers", **options) as llm:
            outputs = llm.generate([{"prompt_token_ids": own} for own in PROMPTS], GREEDY, use_tqdm=False)
            found.append([own.outputs[0] for own in outputs])
    packed, dense = found
    assert [own.token_ids for own in packed] == [own.token_ids for own in dense]
    for ours, theirs in zip(packed, dense, strict=True):
        for first, second in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert (
                max(abs(first[token].logprob - second[token].logprob) for token in first.keys() & second.keys()) < 1e-4
            )
