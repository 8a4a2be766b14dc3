"""Qwen 2 and 2.5 (Qwen team, 2024): Llama with biases of q, k and v; Qwen 3 (2025): with QK norms instead; and their mixtures of
experts, in Qwen 2 beside an MLP of all tokens; and the text decoders of Qwen2-VL, 2.5 and 3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanoengine.models.config_fields import MAX_LAYERS, ConfigFields
from nanoengine.models.families.common import biases_of, head_dim_of, read_decoder
from nanoengine.models.families.routed import local_experts, with_experts
from nanoengine.models.families.windows import window_of, windows_of_qwen
from nanoengine.models.model_config import ExpertsConfig, LayerConfig, ModelConfig, TensorNames
from nanoengine.models.rope_config import read_rope, remove_sections

QWEN2_VL: tuple[str, dict[str, Any]] = "Qwen2ForCausalLM", {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
MULTIMODAL = {
    **dict.fromkeys(("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"), QWEN2_VL),
    "Qwen3VLForConditionalGeneration": ("Qwen3ForCausalLM", {"rope_theta": 5e5}),
    "Qwen3VLMoeForConditionalGeneration": ("Qwen3MoeForCausalLM", {"rope_theta": 5e5, "norm_topk_prob": True}),
}
"""The architecture of each text decoder, and defaults of its fields."""

EXPERT_KEYS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", *MULTIMODAL)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    if architecture in MULTIMODAL:
        return _read_multimodal(fields, architecture)
    if architecture == "Qwen2ForCausalLM":
        return read_decoder(fields, qkv_bias=True, windows=windows_of_qwen(fields))
    if architecture == "Qwen2MoeForCausalLM":
        return _read_qwen2_moe(fields)
    facts = biases_of(fields) | {"qk_norm": "head"}
    if architecture == "Qwen3ForCausalLM":
        return read_decoder(fields, head_dim=128, windows=windows_of_qwen(fields), **facts)
    window = window_of(fields, 4096) if fields.flag("use_sliding_window") else None
    rope, sparse = read_rope(fields, head_dim_of(fields)), sparse_layers(fields)
    layers = tuple(LayerConfig(rope=rope, window=window, has_experts=has_experts) for has_experts in sparse)
    return read_decoder(fields, layers=layers, experts=read_experts(fields), **facts)


def _read_multimodal(fields: ConfigFields, architecture: str) -> ModelConfig:
    decoder, defaults = MULTIMODAL[architecture]
    fields.default(**defaults)
    remove_sections(fields)
    config = read_config(fields, decoder)
    if config.experts is None:
        return config
    experts = replace(config.experts, are_stacked=True, are_transposed=True)
    return replace(config, experts=experts, names=TensorNames(expert_gate_up_down=("gate_up_proj", "down_proj")))


def _read_qwen2_moe(fields: ConfigFields) -> ModelConfig:
    """Qwen2-MoE: beside the experts an MLP with a gate on its output."""
    fields.default(num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408)
    width = fields.integer("shared_expert_intermediate_size", 5632)
    experts = read_experts(fields, shared_size=width, shared_is_gated=True)
    rope, bias = read_rope(fields, head_dim_of(fields)), fields.flag("qkv_bias", True)
    dense = (LayerConfig(rope=rope, window=window) for window in windows_of_qwen(fields, alternate=True))
    layers = with_experts(dense, sparse_layers(fields))
    return read_decoder(fields, layers=layers, experts=experts, qkv_bias=bias)


def read_experts(fields: ConfigFields, **facts: Any) -> ExpertsConfig:
    """The experts of Qwen's models, normalized only if the file says so; `facts`: other fields of the `ExpertsConfig`."""
    count = fields.get("num_local_experts")  # the key of transformers 5
    return local_experts(fields, count, keys=EXPERT_KEYS, normalize=fields.flag("norm_topk_prob"), **facts)


def sparse_layers(fields: ConfigFields) -> list[bool]:
    """Whether each layer has experts: every n-th layer that is not in `mlp_only_layers`."""
    step, dense = fields.integer("decoder_sparse_step", 1), fields.layers("mlp_only_layers")
    count = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    return [i not in dense and (i + 1) % step == 0 for i in range(count)]
