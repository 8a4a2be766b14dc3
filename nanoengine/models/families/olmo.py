"""OLMo 2 and 3 (Ai2, 2024 and 2025): norms behind each part instead of before it, and over all heads of q and k together."""

from __future__ import annotations

from nanoengine.config import MAX_LAYERS
from nanoengine.model_config import LayerConfig, ModelConfig, TensorNames
from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import head_dim_of, layer_types_of, read_decoder, window_of
from nanoengine.models.rope_config import LAYER_TYPES, read_ropes

ARCHITECTURES = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
NAMES = TensorNames(
    norm_before_attention=None,
    norm_after_attention="post_attention_layernorm",
    norm_before_mlp=None,
    norm_after_mlp="post_feedforward_layernorm",
)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    bias = fields.flag("attention_bias")
    layers = _layers_of_olmo3(fields) if architecture == "Olmo3ForCausalLM" else None
    return read_decoder(
        fields, architecture, eps=1e-5, layers=layers, qkv_bias=bias, o_bias=bias, qk_norm="full", names=NAMES
    )


def _layers_of_olmo3(fields: ConfigFields) -> tuple[LayerConfig, ...]:
    """Three of four layers have a window, if nothing is said."""
    count = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    types = layer_types_of(fields) or [LAYER_TYPES[(i + 1) % 4 != 0] for i in range(count)]
    window = window_of(fields, 4096)
    ropes = read_ropes(fields, head_dim_of(fields), 500_000.0)
    return tuple(
        LayerConfig(rope=ropes[kind], window=window if kind == "sliding_attention" else None) for kind in types
    )
