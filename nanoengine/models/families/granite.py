"""Granite 3 and 4 (IBM, 2024): Llama with a scale of its own at each place where widths could matter; dense, or with experts,
which a shared MLP may stand beside.
"""

from __future__ import annotations

from typing import Any

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import biases_of, read_decoder
from nanoengine.models.families.granite_hybrid import NAMES
from nanoengine.models.model_config import ExpertsConfig, ModelConfig, TensorNames

ARCHITECTURES = ("GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    if architecture == "GraniteForCausalLM":
        facts: dict[str, Any] = {"mlp_bias": fields.flag("mlp_bias")}
    else:
        facts = _sparse(fields)
    return read_decoder(
        fields,
        architecture,
        **biases_of(fields),
        **facts,
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_divisor=fields.number("logits_scaling", 1.0),
    )


def _sparse(fields: ConfigFields) -> dict[str, Any]:
    count, is_split = fields.integer("num_local_experts", 8), fields.flag("linears_are_split")
    experts = ExpertsConfig(
        num_experts=count,
        num_chosen=fields.integer("num_experts_per_tok", 2, most=count),
        intermediate_size=fields.integer("intermediate_size"),
        normalize=True,
        are_stacked=not is_split,
        shared_size=fields.integer("shared_intermediate_size") if fields.get("shared_intermediate_size") else 0,
    )
    return {"experts": experts, "names": TensorNames() if is_split else NAMES}
