"""Folders with quantized weights, of architectures that transformers' modules compute: the dequantized weights are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.architectures.checkpoints import make
from nanoengine import LLM, SamplingParams
from tests.models.quantization.packed_models import FORMS, pack_folder

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=3)
PROMPTS = [[3, 5, 7, 11, 13], list(range(20, 60))]
OPTIONS = {"dtype": "float32", "activation_dtype": "float32", "device": "cpu", "max_model_len": 128}


def fits(name: str, tensor: torch.Tensor) -> bool:
    """Whether blocks of every form fill the rows of a matrix."""
    return name.endswith("proj.weight") and tensor.dim() == 2 and not any(size % 32 for size in tensor.shape)


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
    folder = pack_folder(tmp_path / "model", tmp_path / "packed", FORMS[form], chosen=fits)
    answers = []
    for path in (folder, folder / "dense"):
        with LLM(str(path), use_tqdm=False, model_impl="transformers", num_kv_blocks=100, **OPTIONS) as llm:
            answers.append([output.outputs[0] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])
    packed, dense = answers
    assert [own.token_ids for own in packed] == [own.token_ids for own in dense]
    for ours, theirs in zip(packed, dense, strict=True):
        for first, second in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert (
                max(abs(first[token].logprob - second[token].logprob) for token in first.keys() & second.keys()) < 1e-4
            )
