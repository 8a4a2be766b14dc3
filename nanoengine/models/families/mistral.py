"""Mistral (Jiang et al., 2023): Llama with a sliding window, which later models do without."""

from __future__ import annotations

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import read_decoder
from nanoengine.models.families.windows import window_of
from nanoengine.models.model_config import ModelConfig

ARCHITECTURES = ("MistralForCausalLM",)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    return read_decoder(fields, architecture, windows=(window_of(fields, 4096),))
