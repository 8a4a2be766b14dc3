"""Fields of config.json of mixtures of experts whose first layers are dense, and whose router is that of DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from nanoengine.models.config_fields import MAX_LAYERS, ConfigFields
from nanoengine.models.model_config import ExpertsConfig

SHARED = (".shared_expert.", ".shared_experts.")
"""Our name of the MLP that all tokens share, and theirs."""


def routed_experts(fields: ConfigFields, key: str, **facts: Any) -> ExpertsConfig:
    """Experts, as many as the field `key` says; `facts` are those in which they differ."""
    fields.expect("scoring_func", "sigmoid", "noaux_tc")
    fields.expect("topk_method", "noaux_tc")
    fields.expect("moe_layer_freq", 1)
    count, groups = fields.integer(key), fields.integer("n_group", 1)
    size, rest = divmod(count, groups)
    if rest or size < 2:
        raise fields.wrong("n_group", groups, f"{count} experts must make as many groups, of two or more")
    chosen, width = fields.integer("topk_group", 1, groups), fields.integer("moe_intermediate_size")
    shared = fields.integer("n_shared_experts") if fields.get("n_shared_experts") else 0
    all_facts: dict[str, Any] = {
        "normalize": fields.flag("norm_topk_prob"),
        "scores": "sigmoid",
        "bias_shape": (count,),
        "scale": fields.number("routed_scaling_factor", 1.0),
        "shared_size": shared * width,
        **facts,
    }
    return ExpertsConfig(
        num_experts=count,
        num_chosen=fields.integer("num_experts_per_tok", most=chosen * size),
        intermediate_size=width,
        num_groups=groups,
        groups_chosen=chosen,
        **all_facts,
    )


def sparse_after(fields: ConfigFields, key: str, default: int) -> list[bool]:
    """Whether each layer has experts: all behind the first, which the field `key` counts."""
    dense, count = fields.get(key, default), fields.integer("num_hidden_layers", most=MAX_LAYERS)
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        raise fields.wrong(key, dense, "it must be a number of layers")
    return [number >= dense for number in range(count)]
