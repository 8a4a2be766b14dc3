"""Qwen2-VL, 2.5 and 3 (Qwen team, 2024 and 2025), text: the decoders of Qwen 2 and 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families import qwen
from nanoengine.models.model_config import ModelConfig, TensorNames
from nanoengine.models.rope_config import remove_sections

QWEN2: tuple[str, dict[str, Any]] = "Qwen2ForCausalLM", {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
DECODERS = {
    **dict.fromkeys(("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"), QWEN2),
    "Qwen3VLForConditionalGeneration": ("Qwen3ForCausalLM", {"rope_theta": 5e5}),
    "Qwen3VLMoeForConditionalGeneration": ("Qwen3MoeForCausalLM", {"rope_theta": 5e5, "norm_topk_prob": True}),
}
"""The architecture of each decoder, and defaults of its fields."""

ARCHITECTURES = tuple(DECODERS)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    decoder, defaults = DECODERS[architecture]
    for key, value in defaults.items():
        fields.default(key, value)
    remove_sections(fields)
    config = replace(qwen.read_config(fields, decoder), architecture=architecture)
    if config.experts is None:
        return config
    experts = replace(config.experts, are_stacked=True, are_transposed=True)
    return replace(config, experts=experts, names=TensorNames(expert_gate_up_down=("gate_up_proj", "down_proj")))
