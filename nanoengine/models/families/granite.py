"""Granite 3 and 4 (IBM, 2024), dense or with experts: Llama with a scale of its own at each place where widths could matter."""

from __future__ import annotations

from typing import Any

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import biases_of, read_decoder
from nanoengine.models.families.granite_hybrid import NAMES, experts_of
from nanoengine.models.model_config import ModelConfig, TensorNames

MOE = "GraniteMoeForCausalLM"
ARCHITECTURES = ("GraniteForCausalLM", MOE)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    facts: dict[str, Any] = {}
    if architecture == MOE:
        is_split = fields.flag("linears_are_split")  # as in GGUF files
        facts = {"experts": experts_of(fields, 0, is_split), "names": TensorNames() if is_split else NAMES}
    else:
        facts = {"mlp_bias": fields.flag("mlp_bias")}
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
