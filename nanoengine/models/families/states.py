"""Fields of config.json that hybrids share: which layers have states in place of attention."""

from __future__ import annotations

from collections.abc import Sequence

from nanoengine.errors import UnsupportedModel
from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.windows import layer_types_of
from nanoengine.models.model_config import LayerConfig, RopeConfig, StateConfig

MOST_TAPS, MOST_HEADS, MOST_DEPTH = 8, 2**12, 2**8
"""Beyond what any model has, and within what kernels have room for."""


def hybrid_layers(
    fields: ConfigFields, mixer: str, names: Sequence[str], rope: RopeConfig | None, types: Sequence[str] | None = None
) -> list[LayerConfig]:
    """What each layer is: `names` are what the file calls those with attention, and those with states.

    Args:
        types: if the file says nothing.

    Raises:
        UnsupportedModel: other types, or none.
    """
    found = layer_types_of(fields, names) or types
    if found is None:
        raise UnsupportedModel(f"layer_types is missing in {fields.where}: it must name the layers with attention")
    return [LayerConfig(rope=None, mixer=mixer) if _has_state(kind) else LayerConfig(rope=rope) for kind in found]


def _has_state(kind: str) -> bool:
    return kind not in ("full_attention", "attention")


def check_groups(fields: ConfigFields, key: str, states: StateConfig) -> StateConfig:
    """UnsupportedModel unless heads can share queries and keys."""
    if states.num_heads % states.num_groups:
        raise fields.wrong(key, states.num_heads, f"it must be a multiple of {states.num_groups}, which share them")
    return states
