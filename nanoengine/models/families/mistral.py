"""Mistral (Jiang et al., 2023): Llama with a sliding window, which later models do without; and Mixtral (2024): with experts."""

from __future__ import annotations

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import read_decoder
from nanoengine.models.families.windows import window_of
from nanoengine.models.model_config import ExpertsConfig, ModelConfig, TensorNames

ARCHITECTURES = ("MistralForCausalLM", "MixtralForCausalLM")
MIXTRAL_NAMES = TensorNames(experts="block_sparse_moe", expert_gate_up_down=("w1", "w3", "w2"))


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    if architecture == "MistralForCausalLM":
        return read_decoder(fields, architecture, windows=(window_of(fields, 4096),))
    experts = ExpertsConfig(
        num_experts=fields.integer("num_local_experts"),
        num_chosen=fields.integer("num_experts_per_tok", most=fields.integer("num_local_experts")),
        intermediate_size=fields.integer("intermediate_size"),
        normalize=True,
    )
    windows = (window_of(fields),)
    return read_decoder(
        fields, architecture, eps=1e-5, theta=1e6, windows=windows, experts=experts, names=MIXTRAL_NAMES
    )
