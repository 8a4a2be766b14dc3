"""Fields of config.json of hybrid models: the layers with states, and the sizes of the states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nanoengine.errors import UnsupportedModel
from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.windows import layer_types_of
from nanoengine.models.model_config import LayerConfig, RopeConfig, StateConfig

MAX_TAPS = 8
LIMITS = {"taps": MAX_TAPS, "num_heads": 2**12, "num_groups": 2**12, "depth": 2**8, "width": 2**8}
"""Limits of the sizes in a `StateConfig`: above those of published models, and within the buffers of the kernels."""

MAMBA_KEYS = {
    "taps": ("mamba_d_conv", 4),
    "num_heads": ("mamba_n_heads", 128),
    "num_groups": ("mamba_n_groups", 1),
    "depth": ("mamba_d_state", 256),
    "width": ("mamba_d_head", 64),
}
"""Fields and defaults of the sizes of Mamba 2 layers, in most families."""

UNLIMITED = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""Values of `time_step_limit` without a limit: the spellings of Python's json and of transformers 5."""


def hybrid_layers(
    fields: ConfigFields, mixer: str, names: Sequence[str], rope: RopeConfig | None, types: Sequence[str] | None = None
) -> tuple[LayerConfig, ...]:
    """Layers with attention or with a mixer.

    Args:
        mixer: the kind of the layers with states.
        names: the valid layer types, of attention and of states.
        rope: the rotation of the layers with attention.
        types: the default of `layer_types`.

    Raises:
        UnsupportedModel: an invalid layer type, or no types at all.
    """
    types = layer_types_of(fields, names) or types
    if types is None:
        raise UnsupportedModel(f"layer_types is missing in {fields.where}: it must name the layers with attention")
    with_state, attending = LayerConfig(rope=None, attends=False, mixer=mixer), LayerConfig(rope=rope)
    return tuple(attending if kind in ("full_attention", "attention") else with_state for kind in types)


def read_states(fields: ConfigFields, keys: Mapping[str, tuple[str, int]], **facts: Any) -> StateConfig:
    """States of a convolution over q, k and v, or x, B and C, and of a recurrence.

    Args:
        keys: the field and the default of each size in `LIMITS`.
        facts: other fields of the `StateConfig`, and sizes that are not in the file.

    Raises:
        UnsupportedModel: a size out of its limits, or groups of unequal numbers of heads.
    """
    for size, most in LIMITS.items():
        facts[size] = facts[size] if size in facts else fields.integer(*keys[size], most)
    heads, groups = facts["num_heads"], facts["num_groups"]
    if heads % groups:
        raise fields.wrong(keys["num_heads"][0], heads, f"it must be a multiple of {groups}, the number of groups")
    return StateConfig(channels=heads * facts["width"] + 2 * groups * facts["depth"], **facts)


def mamba_states(fields: ConfigFields, inner: int | None = None, **facts: Any) -> StateConfig:
    """States of Mamba 2 layers.

    Args:
        inner: the width of x over all heads; None: `mamba_expand` times the hidden size.
        facts: as for `read_states`.

    Raises:
        UnsupportedModel: as `read_states`; heads that do not add up to `inner`; limits of the time steps.
    """
    by_default = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    inner, name = (by_default, "mamba_expand x hidden_size") if inner is None else (inner, "mamba_d_ssm")
    if fields.get("mamba_d_head", "auto") == "auto":
        facts["width"] = inner // fields.integer(*MAMBA_KEYS["num_heads"], LIMITS["num_heads"])
    biases = {"conv_bias": fields.flag("mamba_conv_bias", True), "proj_bias": fields.flag("mamba_proj_bias")}
    states = read_states(fields, MAMBA_KEYS, **biases, **facts)
    if states.width * states.num_heads != inner:
        why = f"with mamba_d_head {states.width}, they must make {inner}, {name}"
        raise fields.wrong("mamba_n_heads", states.num_heads, why)
    check_time_steps(fields)
    return states


def check_time_steps(fields: ConfigFields) -> None:
    """Refuse limits of Mamba's time steps; ignore fields of the initial weights and of the chunked kernels.

    Raises:
        UnsupportedModel: there are limits.
    """
    limits = fields.get("time_step_limit", UNLIMITED[0])
    if limits not in UNLIMITED:
        raise fields.wrong("time_step_limit", limits, "time steps without limits are supported")
    fields.ignore("chunk_size", "mamba_chunk_size", *(f"time_step_{name}" for name in ("min", "max", "floor", "rank")))
