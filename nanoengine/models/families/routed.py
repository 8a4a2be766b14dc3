"""Fields of config.json of mixtures of experts: the softmax router of Mixtral, the router of DeepSeek-V3, sparse layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from nanoengine.models.config_fields import MAX_LAYERS, REQUIRED, ConfigFields
from nanoengine.models.model_config import ExpertsConfig, LayerConfig

SHARED = (".shared_expert.", ".shared_experts.")
"""The MLP of all tokens: its name here, and its name in the files of these families."""

LOCAL_KEYS = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
"""Fields of Mixtral: the number of experts, how many of them are chosen, and the width of each."""


def local_experts(
    fields: ConfigFields,
    count: Any = REQUIRED,
    chosen: Any = REQUIRED,
    *,
    keys: tuple[str, str, str] = LOCAL_KEYS,
    normalize: bool = True,
    **facts: Any,
) -> ExpertsConfig:
    """Experts with a softmax router, as in Mixtral.

    Args:
        count, chosen: defaults of the first two fields.
        keys: names of the fields in `LOCAL_KEYS`.
        normalize, facts: other fields of the `ExpertsConfig`.

    Raises:
        UnsupportedModel: a field that is missing or out of its limits.
    """
    count = fields.integer(keys[0], count)
    chosen, width = fields.integer(keys[1], chosen, count), fields.integer(keys[2])
    return ExpertsConfig(num_experts=count, num_chosen=chosen, intermediate_size=width, normalize=normalize, **facts)


def routed_experts(fields: ConfigFields, key: str, **facts: Any) -> ExpertsConfig:
    """Experts with the router of DeepSeek-V3.

    Args:
        key: the field of the number of experts.
        facts: other fields of the `ExpertsConfig`.

    Raises:
        UnsupportedModel: a field that is missing, out of its limits or not computed.
    """
    fields.expect("scoring_func", "sigmoid", "noaux_tc")
    fields.expect("topk_method", "noaux_tc")
    fields.expect("moe_layer_freq", 1)
    count, groups = fields.integer(key), fields.integer("n_group", 1)
    size, rest = divmod(count, groups)
    if rest or size < 2:
        raise fields.wrong("n_group", groups, f"{count} experts must make as many groups, of two or more")
    chosen, width = fields.integer("topk_group", 1, groups), fields.integer("moe_intermediate_size")
    shared = fields.integer("n_shared_experts", 0, least=0)
    defaults: dict[str, Any] = {
        "num_experts": count,
        "num_chosen": fields.integer("num_experts_per_tok", most=chosen * size),
        "intermediate_size": width,
        "num_groups": groups,
        "groups_chosen": chosen,
        "normalize": fields.flag("norm_topk_prob"),
        "scores": "sigmoid",
        "bias_shape": (count,),
        "scale": fields.number("routed_scaling_factor", 1.0),
        "shared_size": shared * width,
    }
    return ExpertsConfig(**defaults | facts)


def sparse_after(fields: ConfigFields, key: str, default: int) -> list[bool]:
    """Whether each layer has experts: all layers from the number in the field `key` on.

    Raises:
        UnsupportedModel: the field is not a number of layers.
    """
    dense, count = fields.integer(key, default, least=0), fields.integer("num_hidden_layers", most=MAX_LAYERS)
    return [number >= dense for number in range(count)]


def with_experts(layers: Iterable[LayerConfig], sparse: Iterable[bool]) -> tuple[LayerConfig, ...]:
    """Layers with experts where `sparse` is true."""
    return tuple(replace(layer, has_experts=is_sparse) for layer, is_sparse in zip(layers, sparse, strict=True))
