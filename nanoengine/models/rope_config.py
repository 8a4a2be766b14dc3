"""Reading how a model rotates: rope_parameters (transformers 5), or rope_scaling and rope_theta (transformers 4)."""

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
"""Kinds whose factor says how much further than trained a model reaches; of others it says nothing, or the file has the sum."""

THETAS, STRETCHES, SCALES = (1.001, 1e15), (1.0, 1e6), (1e-3, 1e6)
"""From and to what numbers angles can be computed with: of models, thetas are 1e4 to 1e9, and no other is above 128."""


def read_rope(
    fields: ConfigFields,
    head_dim: int,
    theta: float = 10_000.0,
    *,
    may_be_partial: bool = False,
) -> RopeConfig:
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
    fields: ConfigFields,
    head_dim: int,
    theta: float,
    *,
    local_theta: float | None = None,
    full_head_dim: int | None = None,
) -> dict[str, RopeConfig]:
    """How each type of layer rotates: in files of old, scaling (rope_scaling) is for the layers with full attention alone.

    Args:
        fields, head_dim, theta: as for `read_rope`.
        local_theta: base of layers with a window, if the file has none (rope_local_base_freq); without it there is one for all.
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


def take_out(fields: ConfigFields, *names: str) -> None:
    """Remove what the tables of the rotation say beside it."""
    for key in ("rope_scaling", "rope_parameters"):
        if table := fields.table_of(key):
            kept = {name: value for name, value in table.items() if name not in names}
            fields.table = {**fields.table, key: kept}


def forget_sections(fields: ConfigFields) -> None:
    """Remove which pairs turn by which position in a picture: those of a text's token are equal, and "mrope" is "default"."""
    take_out(fields, "mrope_section", "mrope_interleaved")
    for key in ("rope_scaling", "rope_parameters"):
        if table := fields.table_of(key):
            plain = {name: "default" for name in ("type", "rope_type") if table.get(name) == "mrope"}
            fields.table = {**fields.table, key: {**table, **plain}}


def reach(longest: int, ropes: Sequence[RopeConfig]) -> int:
    """Positions that a model is good for: those of its file, or the length that was trained times the factor, if that is more."""
    trained = ((rope.trained_positions or longest, rope.factor) for rope in ropes if rope.kind in STRETCHED)
    return max([longest, *(int(length * factor) for length, factor in trained)])


def rescaled(table: Mapping[str, Any], rope_scaling: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json with another `rope_scaling`, which keeps the base of the frequencies, and how much of a head is rotated."""
    old = table.get("rope_scaling") or table.get("rope_parameters") or {}
    if not isinstance(old, Mapping) or any(isinstance(value, Mapping) for value in old.values()):
        return {**table, "rope_scaling": rope_scaling}
    kept = {key: old[key] for key in ("rope_theta", "partial_rotary_factor") if key in old}
    return {**table, "rope_scaling": kept | {**rope_scaling}, "rope_parameters": None}


def _rope_table(fields: ConfigFields) -> tuple[str, Mapping[str, Any]]:
    """The one instead of the other, as transformers."""
    fields.ignore("rope_parameters")
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    table, other = fields.table_of(key), fields.get("rope_parameters")
    lacks_theta = "rope_theta" not in table and fields.get("rope_theta") is None
    if key == "rope_scaling" and lacks_theta and isinstance(other, Mapping) and "rope_theta" in other:
        why = "it takes the place of rope_parameters, which has a rope_theta: it must have it, too"
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
    rotary_dim = int(head_dim * fraction)
    if kind == "proportional":
        return _proportional(fields, head_dim, fraction, fields.number("rope_theta", theta, *THETAS))
    if fraction != 1.0 and not may_be_partial:
        raise fields.wrong("partial_rotary_factor", fraction, "this architecture rotates whole heads, 1.0 is supported")
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        why = f"of head_dim {head_dim} it must leave an even number of dimensions to rotate"
        raise fields.wrong("partial_rotary_factor", fraction, why)
    theta = fields.number("rope_theta", theta, *THETAS)
    facts = _scaling(kind, fields, outer, rotary_dim // 2)
    fields.refuse_others()
    return RopeConfig(theta=theta, rotary_dim=rotary_dim, kind=kind, **facts)


def _proportional(fields: ConfigFields, head_dim: int, fraction: float, theta: float) -> RopeConfig:
    """The pairs of all of a head, of which the first turn as they would if all did."""
    fields.expect("factor", 1.0)
    fields.refuse_others()
    return RopeConfig(theta=theta, rotary_dim=head_dim, num_pairs=int(fraction * head_dim // 2))


KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "factors")
"""The last is not Hugging Face's: GGUF files name divisors of the frequencies in place of what they follow from."""


def _scaling(kind: str, fields: ConfigFields, outer: ConfigFields, pairs: int) -> dict[str, Any]:
    """The fields of a rotation of this kind beside its base, for this many pairs of dimensions."""
    if kind == "default":
        outer.ignore(TRAINED)  # it is there beside rotations that do not scale, too
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
    # Stated beside the table, in it, or nowhere, in this order.
    trained = outer.integer(TRAINED, fields.integer(TRAINED, longest, MAX_POSITIONS), MAX_POSITIONS)
    if kind == "llama3":
        low, high = (fields.number(f"{end}_freq_factor", REQUIRED, *SCALES) for end in ("low", "high"))
        if high < low:
            raise fields.wrong("high_freq_factor", high, f"it must be at least low_freq_factor ({low})")
        factor = fields.number("factor", REQUIRED, *STRETCHES)
        return {"factor": factor, "trained_positions": trained, "low_freq_factor": low, "high_freq_factor": high}
    factor = longest / trained if fields.get("factor") is None else fields.number("factor", REQUIRED, *STRETCHES)
    return {"factor": factor, "trained_positions": trained} | (
        _yarn(fields, factor) if kind == "yarn" else _longrope(fields, factor, trained, pairs)
    )


def _yarn(fields: ConfigFields, factor: float) -> dict[str, Any]:
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


def _longrope(fields: ConfigFields, factor: float, trained: int, pairs: int) -> dict[str, Any]:
    amplitude = 1.0 if factor <= 1.0 or trained < 2 else math.sqrt(1.0 + math.log(factor) / math.log(trained))
    return {
        "amplitude": _stated_or(fields, "attention_factor", amplitude),
        "long_factors": fields.numbers("long_factor", pairs, *SCALES),
        "short_factors": fields.numbers("short_factor", pairs, *SCALES),
    }


def _stated_or(fields: ConfigFields, key: str, value: float) -> float:
    return value if fields.get(key) is None else fields.number(key, REQUIRED, *SCALES)
