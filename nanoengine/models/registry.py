"""Which class computes which architecture."""

from __future__ import annotations

import torch

from nanoengine.attention.backend import AttentionBackend, AttentionSpec
from nanoengine.config import ModelConfig
from nanoengine.kernels.interface import Kernels
from nanoengine.layers.factory import Factory
from nanoengine.models.qwen3 import Qwen3ForCausalLM

MODELS = {"Qwen3ForCausalLM": Qwen3ForCausalLM}


def attention_specs(config: ModelConfig) -> list[AttentionSpec]:
    """What each layer of the model asks of attention; a backend is chosen by it before the model is built."""
    return MODELS[config.architecture].attention_specs(config)


def build_model(
    config: ModelConfig, kernels: Kernels, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
) -> Qwen3ForCausalLM:
    """The model with unset parameters, on its device and in its dtype from the start: nothing is made twice."""
    return MODELS[config.architecture](config, Factory(kernels, dtype, device), backend)
