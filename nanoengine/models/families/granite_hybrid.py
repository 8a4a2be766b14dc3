"""Granite 4 (IBM, 2025): Mamba 2 in most layers, attention without rotation in the others, experts beside a shared MLP, or that
alone.
"""

from __future__ import annotations

import math
from dataclasses import replace

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import biases_of, head_dim_of, read_decoder
from nanoengine.models.families.states import MOST_DEPTH, MOST_HEADS, MOST_TAPS, check_groups, hybrid_layers
from nanoengine.models.model_config import ExpertsConfig, ModelConfig, StateConfig, TensorNames
from nanoengine.models.rope_config import read_rope

ARCHITECTURES = ("GraniteMoeHybridForCausalLM",)
KINDS = ("full_attention", "attention", "linear_attention", "mamba")

UNLIMITED = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""As Python's json writes it, and as transformers 5 does."""

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
        states=_states(fields),
        names=TensorNames() if is_split else NAMES,
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_divisor=fields.number("logits_scaling", 1.0),
        experts=experts,
        **biases_of(fields),
    )
    return replace(config, intermediate_size=width)


def _states(fields: ConfigFields) -> StateConfig:
    heads, groups = fields.integer("mamba_n_heads", 128, MOST_HEADS), fields.integer("mamba_n_groups", 1, MOST_HEADS)
    inner = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    depth, stated = fields.integer("mamba_d_state", 256, MOST_DEPTH), fields.get("mamba_d_head", "auto")
    width = inner // heads if stated == "auto" else fields.integer("mamba_d_head", most=MOST_DEPTH)
    if width * heads != inner:
        raise fields.wrong(
            "mamba_n_heads", heads, f"of mamba_d_head {width} they must make {inner}, mamba_expand x hidden_size"
        )
    limits = fields.get("time_step_limit", UNLIMITED[0])
    if limits not in UNLIMITED:
        raise fields.wrong("time_step_limit", limits, "steps of time without limits are supported")
    fields.ignore("mamba_chunk_size", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank")
    states = StateConfig(
        taps=fields.integer("mamba_d_conv", 4, MOST_TAPS),
        channels=inner + 2 * groups * depth,
        num_heads=heads,
        num_groups=groups,
        depth=depth,
        width=width,
        conv_bias=fields.flag("mamba_conv_bias", True),
        proj_bias=fields.flag("mamba_proj_bias"),
    )
    return check_groups(fields, "mamba_n_heads", states)


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
