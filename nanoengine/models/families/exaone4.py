"""EXAONE 4 (LG AI Research, 2025): norms behind each part, as in OLMo 2, and over each head of q and k. Where there are windows,
layers that see everything rotate nothing.
"""

from __future__ import annotations

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import head_dim_of, read_decoder
from nanoengine.models.families.olmo import NAMES
from nanoengine.models.families.windows import layer_types_of, types_by_pattern, window_of, windows_by_types
from nanoengine.models.model_config import LayerConfig, ModelConfig
from nanoengine.models.rope_config import read_rope

ARCHITECTURES = ("Exaone4ForCausalLM",)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    rope, window = read_rope(fields, head_dim_of(fields)), window_of(fields, 4096)
    if window is None:
        layers: tuple[LayerConfig, ...] = (LayerConfig(rope=rope),)
    else:
        types = layer_types_of(fields) or types_by_pattern(fields, fields.integer("sliding_window_pattern", 4))
        windows = windows_by_types(types, window)
        layers = tuple(LayerConfig(rope=rope if own else None, window=own) for own in windows)
    fields.ignore("sliding_window_pattern")  # what layer_types were made of
    return read_decoder(fields, architecture, eps=1e-5, layers=layers, qk_norm="head", names=NAMES)
