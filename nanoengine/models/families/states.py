"""Fields of config.json that hybrids share: which layers have states in place of attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nanoengine.errors import UnsupportedModel
from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.windows import layer_types_of
from nanoengine.models.model_config import LayerConfig, RopeConfig, StateConfig

MOST_TAPS, MOST_HEADS, MOST_DEPTH = 8, 2**12, 2**8
"""Beyond what any model has, and within what kernels have room for."""

UNLIMITED = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""Limits of Mamba's steps of time that are none: as Python's json writes it, and as transformers 5 does."""


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
    with_state, attending = LayerConfig(rope=None, attends=False, mixer=mixer), LayerConfig(rope=rope)
    return [with_state if _has_state(kind) else attending for kind in found]


def _has_state(kind: str) -> bool:
    return kind not in ("full_attention", "attention")


def check_groups(fields: ConfigFields, key: str, states: StateConfig) -> StateConfig:
    """UnsupportedModel unless heads can share queries and keys."""
    if states.num_heads % states.num_groups:
        raise fields.wrong(key, states.num_heads, f"it must be a multiple of {states.num_groups}, which share them")
    return states


def mamba_states(fields: ConfigFields, inner: int | None = None) -> StateConfig:
    """Of Mamba 2: `inner` columns, shared out among heads; None: `mamba_expand` times the hidden size."""
    heads, groups = fields.integer("mamba_n_heads", 128, MOST_HEADS), fields.integer("mamba_n_groups", 1, MOST_HEADS)
    by_default = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    inner, what = (by_default, "mamba_expand x hidden_size") if inner is None else (inner, "mamba_d_ssm")
    depth, stated = fields.integer("mamba_d_state", 256, MOST_DEPTH), fields.get("mamba_d_head", "auto")
    width = inner // heads if stated == "auto" else fields.integer("mamba_d_head", most=MOST_DEPTH)
    if width * heads != inner:
        raise fields.wrong("mamba_n_heads", heads, f"of mamba_d_head {width} they must make {inner}, {what}")
    check_time_steps(fields)
    states = StateConfig(
        taps=fields.integer("mamba_d_conv", 4, MOST_TAPS),
        channels=inner + 2 * groups * depth,
        num_heads=heads,
        num_groups=groups,
        depth=depth,
        width=width,
        conv_bias=fields.flag("mamba_conv_bias", True),
        proj_bias=fields.flag("mamba_proj_bias"),
    )
    return check_groups(fields, "mamba_n_heads", states)


def check_time_steps(fields: ConfigFields) -> None:
    """UnsupportedModel if Mamba's steps of time have limits; the other fields say how weights began, and how chunks are cut."""
    limits = fields.get("time_step_limit", UNLIMITED[0])
    if limits not in UNLIMITED:
        raise fields.wrong("time_step_limit", limits, "steps of time without limits are supported")
    fields.ignore("chunk_size", "mamba_chunk_size", *(f"time_step_{own}" for own in ("min", "max", "floor", "rank")))
