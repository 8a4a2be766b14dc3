"""SmolLM 3 (Hugging Face, 2025): Llama without rotation in some layers, by default every fourth."""

from __future__ import annotations

from nanoengine.models.config_fields import MAX_LAYERS, ConfigFields
from nanoengine.models.families.common import biases_of, head_dim_of, read_decoder, rotated_layers
from nanoengine.models.families.windows import FULL, SLIDING, layer_types_of, window_of, windows_by_types
from nanoengine.models.model_config import LayerConfig, ModelConfig
from nanoengine.models.rope_config import read_rope

ARCHITECTURES = ("SmolLM3ForCausalLM",)


def read_config(fields: ConfigFields, _architecture: str) -> ModelConfig:
    count = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    rotates = rotated_layers(fields, count)
    is_used, types = fields.flag("use_sliding_window"), layer_types_of(fields)
    window = window_of(fields) if is_used or types else None
    types = types or [FULL if rotates[i] else SLIDING for i in range(count)]
    windows = windows_by_types(types, window)
    rope = read_rope(fields, head_dim_of(fields), 2e6)
    layers = tuple(LayerConfig(rope=rope if rotates[i] else None, window=windows[i]) for i in range(count))
    return read_decoder(fields, tied=True, layers=layers, **biases_of(fields), mlp_bias=fields.flag("mlp_bias"))
