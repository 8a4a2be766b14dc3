"""Which class computes which architecture."""

from __future__ import annotations

import torch

from nanoengine.attention.backend import AttentionBackend
from nanoengine.config import ModelConfig
from nanoengine.kernels.interface import Kernels
from nanoengine.models.qwen3 import Qwen3ForCausalLM

MODELS = {"Qwen3ForCausalLM": Qwen3ForCausalLM}


def build_model(
    config: ModelConfig, kernels: Kernels, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
) -> Qwen3ForCausalLM:
    """The model with unset parameters, on its device and in its dtype from the start: nothing is made twice."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return MODELS[config.architecture](config, kernels, backend)
    finally:
        torch.set_default_dtype(default)
