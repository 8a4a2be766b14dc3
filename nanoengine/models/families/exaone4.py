"""EXAONE 4 (LG AI Research, 2025): norms after each part, as in OLMo 2, and QK norms; in models with windows, layers with full
attention have no rotation.
"""

from __future__ import annotations

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import head_dim_of, read_decoder
from nanoengine.models.families.olmo import NAMES
from nanoengine.models.families.windows import (
    FULL,
    SLIDING,
    layer_types_of,
    layers_by_types,
    types_by_pattern,
    window_of,
)
from nanoengine.models.model_config import LayerConfig, ModelConfig
from nanoengine.models.rope_config import read_rope

ARCHITECTURES = ("Exaone4ForCausalLM",)


def read_config(fields: ConfigFields, _architecture: str) -> ModelConfig:
    rope, window = read_rope(fields, head_dim_of(fields)), window_of(fields, 4096)
    layers: tuple[LayerConfig, ...] = (LayerConfig(rope=rope),)
    if window is not None:
        types = layer_types_of(fields) or types_by_pattern(fields, fields.integer("sliding_window_pattern", 4))
        layers = layers_by_types(types, {FULL: None, SLIDING: rope}, window)
    fields.ignore("sliding_window_pattern")  # layer_types repeats it
    return read_decoder(fields, eps=1e-5, layers=layers, qk_norm="head", names=NAMES)
