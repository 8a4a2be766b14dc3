"""Granite 4 (IBM, 2025): Mamba 2 in most layers, attention without rotation in the others, experts beside a shared MLP, or that
alone.
"""

from __future__ import annotations

from dataclasses import replace

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import biases_of, head_dim_of, read_decoder
from nanoengine.models.families.states import hybrid_layers, mamba_states
from nanoengine.models.model_config import ExpertsConfig, ModelConfig, TensorNames
from nanoengine.models.rope_config import read_rope

ARCHITECTURES = ("GraniteMoeHybridForCausalLM",)
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
    fields.default("layer_types", fields.get("layers_block_type"))
    fields.expect("position_embedding_type", "rope", "nope")
    is_rotated = fields.get("position_embedding_type") == "rope"
    rope = read_rope(fields, head_dim_of(fields)) if is_rotated else None
    if not is_rotated:
        fields.ignore("rope_theta", "rope_scaling", "rope_parameters")
    layers = hybrid_layers(fields, "mamba2", KINDS, rope)
    fields.ignore("shared_intermediate_size")
    width = fields.integer("shared_intermediate_size", 1024)
    is_split = fields.flag("linears_are_split")  # as in GGUF files: a tensor for each matrix, under the usual names
    experts = _experts(fields, width, is_split) if fields.get("num_local_experts", 8) else None
    if experts is None:
        fields.ignore("num_experts_per_tok")
    layers = [replace(own, has_experts=experts is not None) for own in layers]
    config = read_decoder(
        fields,
        architecture,
        layers=tuple(layers),
        states=mamba_states(fields),
        names=TensorNames() if is_split else NAMES,
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_divisor=fields.number("logits_scaling", 1.0),
        experts=experts,
        **biases_of(fields),
    )
    return replace(config, intermediate_size=width)


def _experts(fields: ConfigFields, shared: int, is_split: bool) -> ExpertsConfig:
    count = fields.integer("num_local_experts", 8)
    return ExpertsConfig(
        num_experts=count,
        num_chosen=fields.integer("num_experts_per_tok", 2, count),
        intermediate_size=fields.integer("intermediate_size"),
        normalize=True,
        are_stacked=not is_split,
        shared_size=shared,
    )
