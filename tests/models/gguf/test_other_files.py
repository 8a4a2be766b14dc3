"""GGUF files that say less or more than a folder, or have its tensors in another form: the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from tests.models.families import GROWING, engine, family_checkpoint
from tests.models.gguf.test_hybrids import numbers_of, what_comes
from tests.models.gguf.written import write_gguf
from tests.support import model_runner

OF_PICTURES: dict[str, Any] = {"vision__block_count": 1, "image_token_id": 7, "rope__dimension_sections": [3, 3, 2, 0]}
OF_PICTURES["more_tensors"] = {"v.blk.0.attn_q.weight": torch.ones(32, 32), "mm.0.weight": torch.ones(4, 4)}
OLLAMA_NAMES = {"attn_sinks.weight": "attn_sinks", "post_attention_norm": "ffn_norm", "attn_output": "attn_out"}


def by_ollama(name: str) -> str:
    for one, other in OLLAMA_NAMES.items():
        name = name.replace(one, other)
    return name


UNTIED = {"tie_word_embeddings": False}
CHUNKS = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "num_hidden_layers": 4}
GRANITE4: dict[str, Any] = {"ssm__conv_kernel": 4, "ssm__state_size": 128, "ssm__group_count": 1}
GRANITE4 |= {"ssm__time_step_rank": 48, "ssm__inner_size": 128, "attention__head_count_kv": [2, 2]}
GRANITE4 |= {"rope__scaling__finetuned": True, "expert_used_count": 0, "expert_count": 0}
MINISTRAL = {"rope_parameters": GROWING["rope_parameters"] | {"mscale": 1.0, "mscale_all_dim": 1.0}}
FILES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt-oss": ("gpt-oss", UNTIED, {}),
    "Llama 4": ("Llama 4", CHUNKS, {}),
    "Llama 4, some layers dense": ("Llama 4", CHUNKS | {"interleave_moe_layer_step": 2}, {}),
    "Granite-MoE": ("Granite-MoE", {}, {}),
    "Granite-MoE, a shared MLP": ("Granite-MoE, shared", {}, {}),
    "Gemma 4, experts": ("Gemma4, experts", {}, {}),
    "gpt-oss of Ollama": (
        *("gpt-oss", {}),
        {"architecture": "gptoss", "rename": by_ollama, "rope__scaling__type": None},
    ),
    "OLMo 3 of Ollama": ("OLMo3, windows", {}, {"architecture": "olmo3"}),
    "Qwen-VL": ("Qwen2", {}, {"architecture": "qwen2vl"} | OF_PICTURES),
    "Qwen3-VL": ("Qwen3, yarn", {}, {"architecture": "qwen3vl", "n_deepstack_layers": 1} | OF_PICTURES),
    "Qwen3-VL-MoE": ("Qwen3-MoE", {}, {"architecture": "qwen3vlmoe"} | OF_PICTURES),
    "Mistral 3": ("Llama", {}, {"architecture": "mistral3", "attention__temperature_scale": 0.0} | OF_PICTURES),
    "Ministral 3 of Ollama": (
        *("Ministral 3", MINISTRAL),
        {"attention__temperature_scale": None, "rope__scaling_beta": 0.3, "rope__scaling__mscale": 1.0}
        | {"rope__scaling__yarn_log_multiplier": None, "rope__scaling__mscale_all_dim": 1.0}
        | OF_PICTURES,
    ),
    "Granite 4, attention alone": ("Granite", {}, GRANITE4 | {"expert_shared_feed_forward_length": 80}),
    "Gemma 3 of Ollama": (
        *("Gemma3", {"query_pre_attn_scalar": 32, "num_hidden_layers": 2}),
        {"rope__freq_base": None, "rope__global__freq_base": 1e6, "rope__local__freq_base": 10000.0}
        | {"attention__sliding_window_pattern": [True, True]}
        | OF_PICTURES,
    ),
}
"""Files: the shape of the folder, what is other than in tests/models/families.py, and what the file says besides."""


@pytest.mark.parametrize("name", FILES)
def test_a_file_computes_what_its_folder_does(name: str, tmp_path: Path) -> None:
    shape, changes, options = FILES[name]
    folder = family_checkpoint(tmp_path, shape, **changes)
    file = write_gguf(folder, tmp_path / "model.gguf", **options)
    (right, tokens), (found, same) = what_comes(folder), what_comes(file, tokenizer=str(folder))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-4)
    assert same == tokens


def test_experts_of_gpt_oss_stay_blocks(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, "gpt-oss", hidden_size=64, intermediate_size=64)
    file = write_gguf(folder, tmp_path / "model.gguf", GGMLQuantizationType.MXFP4)
    options = {"tokenizer": str(folder), "activation_dtype": "float32"}
    found, right = what_comes(file, **options), what_comes(numbers_of(file, tmp_path / "numbers.gguf"), **options)
    assert torch.equal(found[0], right[0])
    assert found[1] == right[1]
    with engine(file, tokenizer=str(folder)) as llm:
        for layer in model_runner(llm).model.layers:
            assert all("MXFP4" in weights.formats() for weights in layer.mlp.experts.mixture.weights)
