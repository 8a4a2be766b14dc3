"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import head_dim_of, read_decoder
from nanoengine.models.families.windows import window_of
from nanoengine.models.model_config import ExpertsConfig, LayerConfig, ModelConfig, TensorNames
from nanoengine.models.rope_config import read_rope

ARCHITECTURES = ("MixtralForCausalLM",)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    experts = ExpertsConfig(
        num_experts=fields.integer("num_local_experts"),
        num_chosen=fields.integer("num_experts_per_tok", most=fields.integer("num_local_experts")),
        intermediate_size=fields.integer("intermediate_size"),
        normalize=True,
    )
    layer = LayerConfig(rope=read_rope(fields, head_dim_of(fields), 1e6), window=window_of(fields), has_experts=True)
    names = TensorNames(experts="block_sparse_moe", expert_gate_up_down=("w1", "w3", "w2"))
    return read_decoder(fields, architecture, eps=1e-5, layers=(layer,), experts=experts, names=names)
