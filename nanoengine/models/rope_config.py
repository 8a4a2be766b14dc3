"""Rotary embeddings of a config.json: rope_parameters (transformers 5), or rope_scaling and rope_theta (transformers 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nanoengine.errors import UnsupportedModel, shown
from nanoengine.models.config_fields import MAX_POSITIONS, REQUIRED, ConfigFields
from nanoengine.models.model_config import RopeConfig

LAYER_TYPES = ("full_attention", "sliding_attention")
RENAMED = {"su": "longrope"}
TRAINED = "original_max_position_embeddings"
STRETCHED = ("linear", "yarn")
"""Kinds whose factor multiplies the trained length; other kinds have no such factor, or files with the product."""

THETAS, STRETCHES, SCALES = (1.001, 1e15), (1.0, 1e6), (1e-3, 1e6)
"""Limits for exact angles: models have thetas from 1e4 to 1e9, and no other value above 128."""


def read_rope(
    fields: ConfigFields, head_dim: int, theta: float = 10_000.0, *, may_be_partial: bool = False
) -> RopeConfig:
    """The rotation of all layers.

    Args:
        fields: of the config.json.
        head_dim: dimensions of a head.
        theta: default base of the frequencies.
        may_be_partial: whether the family supports `partial_rotary_factor`.

    Raises:
        UnsupportedModel: a kind, a field or a value that is not computed.
    """
    key, table = _rope_table(fields)
    if any(isinstance(value, Mapping) for value in table.values()):
        raise UnsupportedModel(f"{key} has a table for each of {shown(list(table))}: one for all layers is supported")
    return _read_one(fields, key, table, head_dim, fields.number("rope_theta", theta, *THETAS), may_be_partial)


def read_ropes(
    fields: ConfigFields,
    head_dim: int,
    theta: float,
    *,
    local_theta: float | None = None,
    full_head_dim: int | None = None,
) -> dict[str, RopeConfig]:
    """The rotation of each layer type; in old files, rope_scaling is of the layers with full attention alone.

    Args:
        fields, head_dim, theta: as for `read_rope`.
        local_theta: default base of layers with a window (rope_local_base_freq); None: one base for all layers.
        full_head_dim: dimensions of a head in layers without a window; None: `head_dim`.

    Raises:
        UnsupportedModel: as `read_rope`.
    """
    thetas = dict.fromkeys(LAYER_TYPES, fields.number("rope_theta", theta, *THETAS))
    if local_theta is not None:
        thetas["sliding_attention"] = fields.number("rope_local_base_freq", local_theta, *THETAS)
    key, table = _rope_table(fields)
    if key == "rope_scaling" and (others := fields.table_of("rope_parameters")):
        both = f"{shown(dict(table))} and rope_parameters is {shown(dict(others))}"
        why = "with a table for each type of layer, the file must have one of the two"
        raise UnsupportedModel(f"rope_scaling is {both}: {why}")
    nested = {name: table[name] for name in table if name in LAYER_TYPES}
    if nested or (table and key == "rope_parameters"):
        if len(nested) < len(table) or not all(isinstance(one, Mapping) for one in nested.values()):
            raise fields.wrong(key, dict(table), f"it must have a table for each of {', '.join(LAYER_TYPES)}")
    else:
        nested = {"full_attention": table}
    is_needed = any(nested.get(name, {}).get("rope_theta") is None for name in LAYER_TYPES)
    if is_needed and local_theta is None and fields.number("rope_theta", theta) != theta:
        why = "rope_parameters, with a table for each type of layer, must say of which"
        raise fields.wrong("rope_theta", fields.get("rope_theta"), why)
    sizes = dict(zip(LAYER_TYPES, (full_head_dim or head_dim, head_dim), strict=True))
    return {name: _read_one(fields, key, nested.get(name, {}), sizes[name], thetas[name]) for name in LAYER_TYPES}


def remove_keys(fields: ConfigFields, *names: str) -> None:
    """Remove keys from the tables of the rotation."""
    for key in ("rope_scaling", "rope_parameters"):
        if table := fields.table_of(key):
            fields.table = {**fields.table, key: {name: table[name] for name in table if name not in names}}


def remove_sections(fields: ConfigFields) -> None:
    """Remove M-RoPE: all three positions of a text token are equal, so it is the default rotation."""
    remove_keys(fields, "mrope_section", "mrope_interleaved")
    for key in ("rope_scaling", "rope_parameters"):
        if table := fields.table_of(key):
            plain = {name: "default" for name in ("type", "rope_type") if table.get(name) == "mrope"}
            fields.table = {**fields.table, key: {**table, **plain}}


def scaled_length(longest: int, ropes: Sequence[RopeConfig]) -> int:
    """Valid positions of a model: the length in its file, or the trained length times the factor, if that is more."""
    trained = ((rope.trained_positions or longest, rope.factor) for rope in ropes if rope.kind in STRETCHED)
    return max([longest, *(int(length * factor) for length, factor in trained)])


def with_rope_scaling(table: Mapping[str, Any], rope_scaling: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json with another `rope_scaling`; the base of the frequencies and the rotated part of a head remain."""
    old = table.get("rope_scaling") or table.get("rope_parameters") or {}
    if not isinstance(old, Mapping) or any(isinstance(value, Mapping) for value in old.values()):
        return {**table, "rope_scaling": rope_scaling}
    base = {key: old[key] for key in ("rope_theta", "partial_rotary_factor") if key in old}
    return {**table, "rope_scaling": base | {**rope_scaling}, "rope_parameters": None}


def _rope_table(fields: ConfigFields) -> tuple[str, Mapping[str, Any]]:
    """The name and the content of the table of the rotation: rope_scaling has precedence, as in transformers."""
    fields.ignore("rope_parameters")
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    table, other = fields.table_of(key), fields.get("rope_parameters")
    lacks_theta = "rope_theta" not in table and fields.get("rope_theta") is None
    if key == "rope_scaling" and lacks_theta and isinstance(other, Mapping) and "rope_theta" in other:
        why = "it replaces rope_parameters, which has a rope_theta: it must have it, too"
        raise fields.wrong(key, dict(table), why)
    return key, table


def _read_one(
    outer: ConfigFields, key: str, table: Mapping[str, Any], head_dim: int, theta: float, may_be_partial: bool = False
) -> RopeConfig:
    fields = ConfigFields(table, f"{key} of {outer.where}")
    stated = fields.get("rope_type", fields.get("type", "default"))
    kind = RENAMED.get(stated, stated) if isinstance(stated, str) else None
    if kind not in KINDS:
        raise fields.wrong("rope_type", stated, f"supported are {', '.join(KINDS)}")
    fraction = fields.number("partial_rotary_factor", outer.number("partial_rotary_factor", 1.0), most=1.0)
    theta = fields.number("rope_theta", theta, *THETAS)
    if kind == "proportional":  # the first pairs of a head rotate, with the frequencies of a whole head
        fields.expect("factor", 1.0)
        fields.refuse_others()
        return RopeConfig(theta=theta, rotary_dim=head_dim, num_pairs=int(fraction * head_dim // 2))
    rotary_dim = int(head_dim * fraction)
    if fraction != 1.0 and not may_be_partial:
        raise fields.wrong("partial_rotary_factor", fraction, "this architecture rotates whole heads, 1.0 is supported")
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        why = f"of head_dim {head_dim} it must leave an even number of dimensions to rotate"
        raise fields.wrong("partial_rotary_factor", fraction, why)
    facts = _scaling(kind, fields, outer, rotary_dim // 2)
    fields.refuse_others()
    return RopeConfig(theta=theta, rotary_dim=rotary_dim, kind=kind, **facts)


KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "factors")
"""Kinds of rotation; "factors" is of GGUF files, which have divisors of the frequencies instead of their parameters."""


def _scaling(kind: str, fields: ConfigFields, outer: ConfigFields, pairs: int) -> dict[str, Any]:
    """Fields of the `RopeConfig` of a kind, beside its base, for `pairs` pairs of dimensions."""
    if kind == "default":
        outer.ignore(TRAINED)  # files without scaling have it, too
        fields.ignore("factor", TRAINED)
        return {}
    if kind == "factors":
        return {"long_factors": fields.numbers("factors", pairs, *SCALES)}
    longest = outer.integer("max_position_embeddings", most=MAX_POSITIONS)
    if kind in ("linear", "dynamic"):
        if kind == "dynamic":
            fields.ignore(TRAINED)
        trained = longest if kind == "dynamic" else 0
        return {"factor": fields.number("factor", REQUIRED, *STRETCHES), "trained_positions": trained}
    # Beside the table, in the table, or by default, in this order.
    trained = outer.integer(TRAINED, fields.integer(TRAINED, longest, MAX_POSITIONS), MAX_POSITIONS)
    if kind == "llama3":
        low, high = (fields.number(f"{end}_freq_factor", REQUIRED, *SCALES) for end in ("low", "high"))
        if high < low:
            raise fields.wrong("high_freq_factor", high, f"it must be at least low_freq_factor ({low})")
        factor = fields.number("factor", REQUIRED, *STRETCHES)
        return {"factor": factor, "trained_positions": trained, "low_freq_factor": low, "high_freq_factor": high}
    factor = longest / trained if fields.get("factor") is None else fields.number("factor", REQUIRED, *STRETCHES)
    return {"factor": factor, "trained_positions": trained} | (
        _yarn_fields(fields, factor) if kind == "yarn" else _longrope_fields(fields, factor, trained, pairs)
    )


def _yarn_fields(fields: ConfigFields, factor: float) -> dict[str, Any]:
    def amplitude(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    scales = [1.0, 0.0]
    if all([fields.get("mscale"), fields.get("mscale_all_dim")]):
        scales = [fields.number(key, REQUIRED, *SCALES) for key in ("mscale", "mscale_all_dim")]
    return {
        "amplitude": _stated_or(fields, "attention_factor", amplitude(scales[0]) / amplitude(scales[1])),
        "beta_fast": _stated_or(fields, "beta_fast", 32.0),
        "beta_slow": _stated_or(fields, "beta_slow", 1.0),
        "truncate": fields.flag("truncate", True),
    }


def _longrope_fields(fields: ConfigFields, factor: float, trained: int, pairs: int) -> dict[str, Any]:
    amplitude = 1.0 if factor <= 1.0 or trained < 2 else math.sqrt(1.0 + math.log(factor) / math.log(trained))
    return {
        "amplitude": _stated_or(fields, "attention_factor", amplitude),
        "long_factors": fields.numbers("long_factor", pairs, *SCALES),
        "short_factors": fields.numbers("short_factor", pairs, *SCALES),
    }


def _stated_or(fields: ConfigFields, key: str, value: float) -> float:
    return value if fields.get(key) is None else fields.number(key, REQUIRED, *SCALES)
