"""Mistral (Jiang et al., 2023): Llama with a sliding window, which later models lack; Mixtral (2024): with experts."""

from __future__ import annotations

from dataclasses import replace

from nanoengine.models.config_fields import MAX_POSITIONS, ConfigFields, UnsupportedArchitecture
from nanoengine.models.families.common import head_dim_of, read_decoder
from nanoengine.models.families.routed import local_experts
from nanoengine.models.families.windows import window_of
from nanoengine.models.model_config import LayerConfig, ModelConfig, TensorNames
from nanoengine.models.rope_config import TRAINED, read_rope, remove_keys

GROWING, MULTIMODAL = "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"
ARCHITECTURES = ("MistralForCausalLM", "MixtralForCausalLM", GROWING, MULTIMODAL)
MIXTRAL_NAMES = TensorNames(experts="block_sparse_moe", expert_gate_up_down=("w1", "w3", "w2"))


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    if architecture == MULTIMODAL and fields.get("model_type") == "mistral4":
        raise UnsupportedArchitecture("Mistral 4 is computed by no family")
    if architecture == MULTIMODAL:
        fields.expect("model_type", "mistral3", "mistral", "ministral3")  # of the text part, if stated
    if architecture == GROWING or (architecture == MULTIMODAL and fields.get("model_type") == "ministral3"):
        return _read_growing(fields)
    if architecture != "MixtralForCausalLM":
        return read_decoder(fields, windows=(window_of(fields, 4096),))
    windows, experts = (window_of(fields),), local_experts(fields)
    return read_decoder(fields, eps=1e-5, theta=1e6, windows=windows, experts=experts, names=MIXTRAL_NAMES)


def _read_growing(fields: ConfigFields) -> ModelConfig:
    """Ministral 3: the scale of queries grows with each multiple of the trained length."""
    table = ConfigFields(fields.table_of("rope_parameters"), f"rope_parameters of {fields.where}")
    growth, period = table.number("llama_4_scaling_beta"), table.integer(TRAINED, most=MAX_POSITIONS)
    remove_keys(fields, "llama_4_scaling_beta", "max_position_embeddings")
    rope = replace(read_rope(fields, head_dim_of(fields, 128)), query_growth=growth, trained_positions=period)
    layers = (LayerConfig(rope=rope, window=window_of(fields)),)
    return read_decoder(fields, head_dim=128, eps=1e-5, layers=layers)
