"""Granite 3 and 4 (IBM, 2024 and 2025): Llama with muP scales, dense or with experts and an MLP of all tokens; the hybrids of
Granite 4 have Mamba 2 in most layers, and attention without rotation in the others.
"""

from __future__ import annotations

from typing import Any

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import biases_of, head_dim_of, read_decoder
from nanoengine.models.families.routed import local_experts, with_experts
from nanoengine.models.families.states import hybrid_layers, mamba_states
from nanoengine.models.model_config import ModelConfig, TensorNames
from nanoengine.models.rope_config import read_rope

DENSE, HYBRID = "GraniteForCausalLM", "GraniteMoeHybridForCausalLM"
ARCHITECTURES = (DENSE, "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", HYBRID)
KINDS = ("full_attention", "attention", "linear_attention", "mamba")

NAMES = TensorNames(
    gate_up=("input_linear",),
    experts="block_sparse_moe",
    router="router.layer",
    expert_gate_up_down=("input_linear", "output_linear"),
    replaced=(
        (".mlp.input_linear.", ".shared_mlp.input_linear."),
        (".mlp.down_proj.", ".shared_mlp.output_linear."),
        (".block_sparse_moe.shared_expert.input_linear.", ".shared_mlp.input_linear."),
        (".block_sparse_moe.shared_expert.down_proj.", ".shared_mlp.output_linear."),
        (".block_sparse_moe.experts.input_linear", ".block_sparse_moe.input_linear.weight"),
        (".block_sparse_moe.experts.output_linear", ".block_sparse_moe.output_linear.weight"),
    ),
)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    facts: dict[str, Any] = biases_of(fields) | {
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "logits_divisor": fields.number("logits_scaling", 1.0),
    }
    if architecture == DENSE:
        return read_decoder(fields, mlp_bias=fields.flag("mlp_bias"), **facts)
    is_split = fields.flag("linears_are_split")  # GGUF files: a tensor for each matrix, under the usual names
    facts["names"] = TensorNames() if is_split else NAMES
    if architecture == HYBRID:
        return _read_hybrid(fields, is_split, facts)
    shared = fields.integer("shared_intermediate_size", 0, least=0)
    experts = local_experts(fields, 8, 2, are_stacked=not is_split, shared_size=shared)
    return read_decoder(fields, experts=experts, **facts)


def _read_hybrid(fields: ConfigFields, is_split: bool, facts: dict[str, Any]) -> ModelConfig:
    fields.default(layer_types=fields.get("layers_block_type"))
    fields.expect("position_embedding_type", "rope", "nope")
    rope = None
    if fields.get("position_embedding_type") == "rope":
        rope = read_rope(fields, head_dim_of(fields))
    else:
        fields.ignore("rope_theta", "rope_scaling", "rope_parameters")
    layers, shared = hybrid_layers(fields, "mamba2", KINDS, rope), fields.integer("shared_intermediate_size", 1024)
    fields.ignore("num_experts_per_tok")
    if fields.get("num_local_experts", 8):
        facts["experts"] = local_experts(fields, 8, 2, are_stacked=not is_split, shared_size=shared)
        layers = with_experts(layers, [True] * len(layers))
    facts |= {"states": mamba_states(fields), "intermediate_size": shared}
    return read_decoder(fields, layers=layers, **facts)
