"""Reading how a model rotates: rope_parameters (transformers 5), or rope_scaling and rope_theta (transformers 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nanoengine.errors import UnsupportedModel, shown
from nanoengine.models.config_fields import REQUIRED, ConfigFields
from nanoengine.models.limits import MAX_POSITIONS
from nanoengine.models.model_config import RopeConfig

LAYER_TYPES = ("full_attention", "sliding_attention")
RENAMED = {"su": "longrope"}

THETAS, STRETCHES, SCALES = (1.001, 1e15), (1.0, 1e6), (1e-3, 1e6)
"""From and to what numbers angles can be computed with: of models, thetas are 1e4 to 1e9, and no other is above 128."""


def read_rope(fields: ConfigFields, head_dim: int, theta: float, *, may_be_partial: bool = False) -> RopeConfig:
    """How all layers rotate.

    Args:
        fields: of the config.json.
        head_dim: dimensions of a head.
        theta: base of the frequencies, if the file has none.
        may_be_partial: whether the family rotates only a part of each head where the file says so.

    Raises:
        UnsupportedModel: a kind or a field of it that is not computed, or a value that cannot be.
    """
    key, table = _rope_table(fields)
    if any(isinstance(value, Mapping) for value in table.values()):
        raise UnsupportedModel(f"{key} has a table for each of {shown(list(table))}: one for all layers is supported")
    return _read_one(fields, key, table, head_dim, fields.number("rope_theta", theta, *THETAS), may_be_partial)


def read_ropes(
    fields: ConfigFields, head_dim: int, theta: float, *, local_theta: float | None = None
) -> dict[str, RopeConfig]:
    """How each type of layer rotates: in files of old, scaling (rope_scaling) is for the layers with full attention alone.

    Args:
        fields, head_dim, theta: as for `read_rope`.
        local_theta: base of layers with a window, if the file has none (rope_local_base_freq); without it there is one for all.

    Raises:
        UnsupportedModel: as `read_rope`.
    """
    thetas = dict.fromkeys(LAYER_TYPES, fields.number("rope_theta", theta, *THETAS))
    if local_theta is not None:
        thetas["sliding_attention"] = fields.number("rope_local_base_freq", local_theta, *THETAS)
    key, table = _rope_table(fields)
    if key == "rope_scaling" and (others := fields.table_of("rope_parameters")):
        raise UnsupportedModel(
            f"rope_scaling is {shown(dict(table))} and rope_parameters is {shown(dict(others))}: with a table for each type "
            "of layer, the file must have one of the two"
        )
    nested = {name: table[name] for name in table if name in LAYER_TYPES}
    if nested or (table and key == "rope_parameters"):
        if len(nested) < len(table) or not all(isinstance(one, Mapping) for one in nested.values()):
            raise UnsupportedModel(
                f"{key} is {shown(dict(table))}: it must have a table for each of {', '.join(LAYER_TYPES)}"
            )
    else:
        nested = {"full_attention": table}
    is_needed = any(nested.get(name, {}).get("rope_theta") is None for name in LAYER_TYPES)
    if is_needed and local_theta is None and fields.number("rope_theta", theta) != theta:
        stated = shown(fields.get("rope_theta"))
        raise UnsupportedModel(
            f"rope_theta is {stated}: rope_parameters, with a table for each type of layer, must say of which"
        )
    return {name: _read_one(fields, key, nested.get(name, {}), head_dim, thetas[name]) for name in LAYER_TYPES}


def _rope_table(fields: ConfigFields) -> tuple[str, Mapping[str, Any]]:
    fields.get("rope_parameters")
    key = (
        "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    )  # the one instead of the other, as transformers
    return key, fields.table_of(key)


def _read_one(
    outer: ConfigFields, key: str, table: Mapping[str, Any], head_dim: int, theta: float, may_be_partial: bool = False
) -> RopeConfig:
    fields = ConfigFields(table, f"{key} of {outer.where}")
    stated = fields.get("rope_type", fields.get("type", "default"))
    kind = RENAMED.get(stated, stated) if isinstance(stated, str) else None
    if kind not in READERS:
        raise UnsupportedModel(f"rope_type is {shown(stated)}: supported are {', '.join(READERS)}")
    fraction = fields.number("partial_rotary_factor", outer.number("partial_rotary_factor", 1.0), most=1.0)
    rotary_dim = int(head_dim * fraction)
    if fraction != 1.0 and not may_be_partial:
        raise UnsupportedModel(
            f"partial_rotary_factor is {fraction}: this architecture rotates whole heads, 1.0 is supported"
        )
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise UnsupportedModel(
            f"partial_rotary_factor is {fraction}: of head_dim {head_dim} it must leave an even number of dimensions to rotate"
        )
    rope = RopeConfig(
        theta=fields.number("rope_theta", theta, *THETAS),
        rotary_dim=rotary_dim,
        kind=kind,
        **READERS[kind](fields, outer, rotary_dim),
    )
    fields.refuse_others()
    return rope


def _default(fields: ConfigFields, outer: ConfigFields, rotary_dim: int) -> dict[str, Any]:  # noqa: ARG001
    outer.get("original_max_position_embeddings")  # it is there beside rotations that do not scale, too
    fields.get("factor")
    fields.get("original_max_position_embeddings")
    return {}


def _linear(fields: ConfigFields, outer: ConfigFields, rotary_dim: int) -> dict[str, Any]:  # noqa: ARG001
    return {"factor": fields.number("factor", REQUIRED, *STRETCHES)}


def _dynamic(fields: ConfigFields, outer: ConfigFields, rotary_dim: int) -> dict[str, Any]:  # noqa: ARG001
    fields.get("original_max_position_embeddings")
    positions = outer.integer("max_position_embeddings", most=MAX_POSITIONS)
    return {"factor": fields.number("factor", REQUIRED, *STRETCHES), "trained_positions": positions}


def _llama3(fields: ConfigFields, outer: ConfigFields, rotary_dim: int) -> dict[str, Any]:  # noqa: ARG001
    low, high = (fields.number(f"{end}_freq_factor", REQUIRED, *SCALES) for end in ("low", "high"))
    if high <= low:
        raise UnsupportedModel(f"high_freq_factor is {high}: it must be more than low_freq_factor ({low})")
    return {
        "factor": fields.number("factor", REQUIRED, *STRETCHES),
        "trained_positions": _trained_positions(fields, outer),
        "low_freq_factor": low,
        "high_freq_factor": high,
    }


def _yarn(fields: ConfigFields, outer: ConfigFields, rotary_dim: int) -> dict[str, Any]:  # noqa: ARG001
    trained = _trained_positions(fields, outer)
    factor = _factor(fields, outer, trained)
    mscale, mscale_all = fields.get("mscale"), fields.get("mscale_all_dim")
    if mscale and mscale_all:
        scales = [fields.number(key, REQUIRED, *SCALES) for key in ("mscale", "mscale_all_dim")]
        amplitude = _yarn_amplitude(factor, scales[0]) / _yarn_amplitude(factor, scales[1])
    else:
        amplitude = _yarn_amplitude(factor, 1.0)
    return {
        "factor": factor,
        "trained_positions": trained,
        "amplitude": _stated_or(fields, "attention_factor", amplitude),
        "beta_fast": _stated_or(fields, "beta_fast", 32.0),
        "beta_slow": _stated_or(fields, "beta_slow", 1.0),
        "truncate": fields.flag("truncate", True),
    }


def _yarn_amplitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(fields: ConfigFields, outer: ConfigFields, rotary_dim: int) -> dict[str, Any]:
    trained = _trained_positions(fields, outer)
    factor = _factor(fields, outer, trained)
    amplitude = 1.0 if factor <= 1.0 or trained < 2 else math.sqrt(1.0 + math.log(factor) / math.log(trained))
    return {
        "factor": factor,
        "trained_positions": trained,
        "amplitude": _stated_or(fields, "attention_factor", amplitude),
        "long_factors": fields.numbers("long_factor", rotary_dim // 2, *SCALES),
        "short_factors": fields.numbers("short_factor", rotary_dim // 2, *SCALES),
    }


def _factors(fields: ConfigFields, outer: ConfigFields, rotary_dim: int) -> dict[str, Any]:  # noqa: ARG001
    return {"long_factors": fields.numbers("factors", rotary_dim // 2, *SCALES)}


READERS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "factors": _factors,  # GGUF files name divisors of the frequencies in place of what they follow from
}


def _trained_positions(fields: ConfigFields, outer: ConfigFields) -> int:
    """Stated beside the table, in it, or nowhere, in this order."""
    inner = fields.integer("original_max_position_embeddings", outer.get("max_position_embeddings"), MAX_POSITIONS)
    return outer.integer("original_max_position_embeddings", inner, MAX_POSITIONS)


def _factor(fields: ConfigFields, outer: ConfigFields, trained: int) -> float:
    """Of what was trained, if it is not stated."""
    return _stated_or(fields, "factor", outer.integer("max_position_embeddings", most=MAX_POSITIONS) / trained)


def _stated_or(fields: ConfigFields, key: str, value: float) -> float:
    bounds = STRETCHES if key == "factor" else SCALES
    return fields.number(key, REQUIRED, *bounds) if fields.get(key) is not None else value
