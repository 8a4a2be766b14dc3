"""OLMo 2 and 3 (Ai2, 2024 and 2025): norms after each part instead of before it, and QK norms over all heads."""

from __future__ import annotations

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import biases_of, head_dim_of, read_decoder
from nanoengine.models.families.windows import layers_by_types, types_by_pattern, window_of
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
    return read_decoder(fields, eps=1e-5, layers=layers, **biases_of(fields), qk_norm="full", names=NAMES)


def _layers_of_olmo3(fields: ConfigFields) -> tuple[LayerConfig, ...]:
    """Layers of which three of four have a window by default."""
    ropes = read_ropes(fields, head_dim_of(fields), 500_000.0)
    return layers_by_types(types_by_pattern(fields, 4), ropes, window_of(fields, 4096))
