"""GGUF files compute what the folders do that they were written from: hybrids, files that say less or more than a folder or have
its tensors in another form, and blocks.

Files with the same config and the same weights as their folders are in tests/models/test_checkpoint.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from nanoengine import SamplingParams
from nanoengine.models.gguf.file import GGUFFile
from tests.models.families import GROWING, engine, family_checkpoint
from tests.models.gguf.written import F32, write_file, write_gguf
from tests.support import forced_logits, model_runner

TOKENS = torch.randint(0, 250, (75,), generator=torch.Generator().manual_seed(0)).tolist()
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
SIX_HEADS = {"linear_num_value_heads": 6}
HYBRIDS: dict[str, dict[str, Any]] = {
    **{shape: {} for shape in ("LFM2", "LFM2-MoE", "Qwen3.5, odd sizes", "Qwen3-Next", "Granite 4", "Nemotron 3")},
    "Qwen3.5": SIX_HEADS,
    "Qwen3.5-MoE": SIX_HEADS,
    "Granite 4, dense, rotated": {"mamba_proj_bias": False},
    "Falcon H1": UNTIED,
    "Falcon H1, without norms, untied": {},
    "Nemotron-H": {"use_bias": False},
    "Nemotron 3, experts of latents": {"layers_block_type": ["mamba", "moe", "attention"]},
}
FILES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{shape: (shape, changes, {}) for shape, changes in HYBRIDS.items()},
    "Qwen3-Next, the first files": (
        *("Qwen3-Next", {}),
        {"legacy": True, "attention__recurrent_layers": None, "feed_forward_length": None},
    ),
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


WIDE = {"hidden_size": 64, "intermediate_size": 96}
BLOCKS: dict[str, dict[str, Any]] = {
    "LFM2": WIDE,
    "LFM2-MoE": WIDE | {"moe_intermediate_size": 32},
    "Qwen3.5": WIDE | SIX_HEADS,
    "Qwen3-Next": WIDE | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "Granite 4": WIDE | {"shared_intermediate_size": 96},
    "Falcon H1": WIDE | UNTIED,
    "Nemotron-H": WIDE | {"use_bias": False},
    "gpt-oss": {"hidden_size": 64, "intermediate_size": 64},
}
"""Shapes with rows of whole blocks."""


def what_comes(path: Path, **options: Any) -> tuple[torch.Tensor, list[int]]:
    """Logits at every position, and tokens."""
    with engine(path, **options) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        (output,) = llm.generate([TOKENS[:40]], greedy, use_tqdm=False)
        return forced_logits(llm, TOKENS, 60, 40), list(output.outputs[0].token_ids)


def numbers_of(file: Path, path: Path) -> Path:
    """A file of the numbers that the blocks of another stand for."""
    reader, opened = GGUFReader(file), GGUFFile.open(file)
    numbers = {own.name: dequantize(own.data, own.tensor_type) for own in reader.tensors}
    keys = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in opened.metadata.items()}
    return write_file(path, keys.pop("general.architecture"), keys, numbers, F32)


@pytest.mark.parametrize("name", FILES)
def test_a_file_computes_what_its_folder_does(name: str, tmp_path: Path) -> None:
    shape, changes, options = FILES[name]
    folder = family_checkpoint(tmp_path, shape, **changes)
    file = write_gguf(folder, tmp_path / "model.gguf", **options)
    (right, tokens), (found, same) = what_comes(folder), what_comes(file, tokenizer=str(folder))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-4)
    assert same == tokens


@pytest.mark.parametrize("shape", BLOCKS)
def test_blocks_stay_blocks_and_are_right(shape: str, tmp_path: Path) -> None:
    """Beside a file of the numbers that the blocks stand for: to the bit, if activations are not rounded."""
    kind = GGMLQuantizationType.MXFP4 if shape == "gpt-oss" else GGMLQuantizationType.Q8_0
    folder = family_checkpoint(tmp_path / "folder", shape, **BLOCKS[shape])
    file = write_gguf(folder, tmp_path / "blocks.gguf", kind)
    plain = numbers_of(file, tmp_path / "numbers.gguf")
    options = {"tokenizer": str(folder), "activation_dtype": "float32"}
    found, right = what_comes(file, **options), what_comes(plain, **options)
    assert torch.equal(found[0], right[0])
    assert found[1] == right[1]
    with engine(file, tokenizer=str(folder)) as llm:
        model = model_runner(llm).model
        mixers = [part.weight for mixer in model.mixers.values() for part in (mixer.in_proj, mixer.out_proj)]
        experts = [weights for layer in model.layers for weights in layer.mlp.mixture.weights] if not mixers else []
        assert all(kind.name in weights.formats() for weights in mixers + experts)
