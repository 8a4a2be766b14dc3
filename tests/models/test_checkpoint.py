"""A model has the same shape and weights from every format of files, in every family that a GGUF file may hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoengine.kernels.reference.attention import TorchAttention
from nanoengine.kernels.reference.operations import TorchKernels
from nanoengine.models.architectures import read_model_config
from nanoengine.models.decoder import build_model
from nanoengine.models.description import config_table
from nanoengine.models.loader import check_weights, load_weights, open_checkpoint
from nanoengine.models.model_config import ModelConfig
from tests.models.families import BY_TYPE, GROWING, family_checkpoint
from tests.models.gguf.written import write_gguf
from tests.support import tensors_of


def load(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The shape, and all weights as they lie in the model."""
    config = read_model_config(config_table(path))
    check_weights(config, open_checkpoint(path))
    model = build_model(config, TorchKernels(), TorchAttention(16), torch.float32, torch.device("cpu"))
    places = tensors_of(model)
    for tensor in places.values():
        tensor.fill_(float("nan"))
    load_weights(model.checkpoint_tensors(), open_checkpoint(path), torch.float32, use_tqdm=False)
    return config, places


AMPLITUDES = {"mscale": 1.0, "mscale_all_dim": 1.0}
SCALED = BY_TYPE["full_attention"] | {"attention_factor": 1.2}
UNCHANGED = (
    *("Llama, all biases", "Mixtral", "Qwen2", "Qwen3, yarn", "Qwen3-MoE", "SmolLM3", "Phi3, half rotated"),
    *("Phi3, a window of a block", "Granite", "OLMo2", "Seed-OSS", "GLM-4", "EXAONE 4", "Ernie 4.5", "Hunyuan"),
    *("MiniMax-M2", "ERNIE 4.5", "GLM-4.5", "GLM-4.6, groups, norms", "Gemma4"),
    "Gemma4, inputs of each layer, shared K and V",
)
SHAPES: dict[str, dict[str, Any]] = {shape: {} for shape in UNCHANGED} | {
    "Qwen2-MoE, untied": {"norm_topk_prob": False},
    "Ministral 3": {"rope_parameters": GROWING["rope_parameters"] | AMPLITUDES},
    "OLMo3, yarn where all is seen": {"rope_parameters": BY_TYPE | {"full_attention": SCALED}},
    "Gemma2": {"query_pre_attn_scalar": 32},
    "Gemma3": {"query_pre_attn_scalar": 32},
    "dots1, groups, a window": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
}
"""Shapes that llama.cpp computes, too, and what is other than in tests/models/families.py."""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_folder_and_a_gguf_file_give_the_same_model(tmp_path: Path, shape: str) -> None:
    folder = family_checkpoint(tmp_path, shape, **SHAPES[shape])
    config, weights = load(folder)
    same_config, same_weights = load(write_gguf(folder, tmp_path / "model.gguf"))
    if shape.startswith("Gemma4"):  # whose file has the experts as they are in the model, not in tensors of them all
        same_config = replace(same_config, experts=config.experts, names=config.names)
    assert replace(same_config, rms_norm_eps=config.rms_norm_eps) == config
    assert same_config.rms_norm_eps == pytest.approx(config.rms_norm_eps)  # the file has it as a float32
    assert same_weights.keys() == weights.keys()
    assert all(torch.equal(same_weights[name], weights[name]) for name in weights)
