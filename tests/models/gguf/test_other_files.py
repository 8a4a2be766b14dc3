"""GGUF files that say less or more than a folder, or have its tensors in another form: the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from tests.models.families import engine
from tests.models.gguf.test_hybrids import numbers_of, what_comes
from tests.models.gguf.written import SPLIT, tiny_model, write_gguf
from tests.support import byte_tokenizer, model_runner

OF_PICTURES: dict[str, Any] = {"vision__block_count": 1, "image_token_id": 7, "rope__dimension_sections": [3, 3, 2, 0]}
OF_PICTURES["more_tensors"] = {"v.blk.0.attn_q.weight": torch.ones(32, 32), "mm.0.weight": torch.ones(4, 4)}
OLLAMA_NAMES = {"attn_sinks.weight": "attn_sinks", "post_attention_norm": "ffn_norm", "attn_output": "attn_out"}


def by_ollama(name: str) -> str:
    for one, other in OLLAMA_NAMES.items():
        name = name.replace(one, other)
    return name


FILES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in SPLIT},
    "gpt-oss of Ollama": ("gpt_oss", {"architecture": "gptoss", "rename": by_ollama, "rope__scaling__type": None}),
    "OLMo 3 of Ollama": ("olmo3", {"architecture": "olmo3"}),
    "Qwen-VL": ("qwen2", {"architecture": "qwen2vl"} | OF_PICTURES),
    "Qwen3-VL": ("qwen3", {"architecture": "qwen3vl", "n_deepstack_layers": 1} | OF_PICTURES),
    "Qwen3-VL-MoE": ("qwen3_moe", {"architecture": "qwen3vlmoe"} | OF_PICTURES),
    "Mistral 3": ("llama", {"architecture": "mistral3", "attention__temperature_scale": 0.0} | OF_PICTURES),
    "Ministral 3": ("ministral3", {}),
    "Ministral 3 of Ollama": (
        "ministral3",
        {"attention__temperature_scale": None, "rope__scaling_beta": 0.25, "rope__scaling__mscale": 1.0}
        | {"rope__scaling__yarn_log_multiplier": None, "rope__scaling__mscale_all_dim": 1.0}
        | OF_PICTURES,
    ),
    "Granite 4, attention alone": (
        "granite",
        {"ssm__conv_kernel": 4, "ssm__state_size": 128, "ssm__group_count": 1, "ssm__time_step_rank": 48}
        | {"attention__head_count_kv": [2, 2], "rope__scaling__finetuned": True, "expert_used_count": 0}
        | {"expert_count": 0, "expert_shared_feed_forward_length": 96, "ssm__inner_size": 128},
    ),
    "Gemma 3 of Ollama": (
        "gemma3_text",
        {"rope__freq_base": None, "rope__global__freq_base": 5000.0, "rope__local__freq_base": 10000.0}
        | {"attention__sliding_window_pattern": [True, True]}
        | OF_PICTURES,
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_computes_what_its_folder_does(name: str, tmp_path: Path) -> None:
    kind, options = FILES[name]
    model, tensors = tiny_model(kind, tmp_path, vocab_size=300)
    byte_tokenizer().save_pretrained(tmp_path)
    file = write_gguf(model, tensors, tmp_path / "model.gguf", **options)
    (right, tokens), (found, same) = what_comes(tmp_path), what_comes(file, tokenizer=str(tmp_path))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-4)
    assert same == tokens


def test_experts_of_gpt_oss_stay_blocks(tmp_path: Path) -> None:
    model, tensors = tiny_model("gpt_oss", tmp_path, vocab_size=300)
    byte_tokenizer().save_pretrained(tmp_path)
    file = write_gguf(model, tensors, tmp_path / "model.gguf", GGMLQuantizationType.MXFP4)
    options = {"tokenizer": str(tmp_path), "activation_dtype": "float32"}
    found, right = what_comes(file, **options), what_comes(numbers_of(file, tmp_path / "numbers.gguf"), **options)
    assert torch.equal(found[0], right[0])
    assert found[1] == right[1]
    with engine(file, tokenizer=str(tmp_path)) as llm:
        for layer in model_runner(llm).model.layers:
            assert all("MXFP4" in weights.formats() for weights in layer.mlp.mixture.weights)
