"""Qwen 2 and 2.5 (Qwen team, 2024): Llama with biases of q, k and v."""

from __future__ import annotations

from nanoengine.errors import UnsupportedModel, shown
from nanoengine.model_config import ModelConfig
from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import layer_types_of, read_decoder, window_of

ARCHITECTURES = ("Qwen2ForCausalLM",)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    return read_decoder(fields, architecture, qkv_bias=True, window=window_of_qwen(fields))


def window_of_qwen(fields: ConfigFields) -> int | None:
    """The window of some layers, by their types or behind the first `max_window_layers`; it is taken to be that of all."""
    types, first = layer_types_of(fields), fields.get("max_window_layers", 28)
    window = window_of(fields, 4096) if fields.flag("use_sliding_window") else None
    if not isinstance(first, int):
        raise UnsupportedModel(f"max_window_layers is {shown(first)}: it must be a number of layers")
    has_windows = first < fields.integer("num_hidden_layers") if types is None else "sliding_attention" in types
    return window if has_windows else None
