"""Granite 3 and 4, dense (IBM, 2024): Llama with a scale of its own at each place where widths could matter."""

from __future__ import annotations

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import biases_of, read_decoder
from nanoengine.models.model_config import ModelConfig

ARCHITECTURES = ("GraniteForCausalLM",)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    return read_decoder(
        fields,
        architecture,
        **biases_of(fields),
        mlp_bias=fields.flag("mlp_bias"),
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_divisor=fields.number("logits_scaling", 1.0),
    )
