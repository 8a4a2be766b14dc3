"""OLMo 2 and 3 (Ai2, 2024 and 2025): norms behind each part instead of before it, and over all heads of q and k together."""

from __future__ import annotations

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import biases_of, head_dim_of, read_decoder
from nanoengine.models.families.windows import types_by_pattern, window_of, windows_by_types
from nanoengine.models.model_config import LayerConfig, ModelConfig, TensorNames
from nanoengine.models.rope_config import read_ropes

ARCHITECTURES = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
NAMES = TensorNames(
    norm_before_attention=None,
    norm_after_attention="post_attention_layernorm",
    norm_before_mlp=None,
    norm_after_mlp="post_feedforward_layernorm",
)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    layers = _layers_of_olmo3(fields) if architecture == "Olmo3ForCausalLM" else None
    return read_decoder(fields, architecture, eps=1e-5, layers=layers, **biases_of(fields), qk_norm="full", names=NAMES)


def _layers_of_olmo3(fields: ConfigFields) -> tuple[LayerConfig, ...]:
    """Three of four layers have a window, if nothing is said."""
    types = types_by_pattern(fields, 4)
    windows = windows_by_types(types, window_of(fields, 4096))
    ropes = read_ropes(fields, head_dim_of(fields), 500_000.0)
    return tuple(LayerConfig(rope=ropes[kind], window=window) for kind, window in zip(types, windows, strict=True))
