"""Qwen3-Next and Qwen3.5 (Qwen team, 2025 and 2026), their part for text: the gated delta rule in three of four layers, attention
with gates in the fourth; experts beside one that all tokens share in some.
"""

from __future__ import annotations

from dataclasses import replace

from nanoengine.models.config_fields import MAX_LAYERS, ConfigFields
from nanoengine.models.families.common import biases_of, head_dim_of, read_decoder
from nanoengine.models.families.qwen import read_experts, sparse_layers
from nanoengine.models.families.states import MOST_DEPTH, MOST_HEADS, MOST_TAPS, check_groups, hybrid_layers
from nanoengine.models.model_config import ModelConfig, StateConfig
from nanoengine.models.rope_config import forget_sections, read_rope

NEXT = "Qwen3NextForCausalLM"
PLAIN = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
ARCHITECTURES = (NEXT, *PLAIN, "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
KINDS = ("full_attention", "linear_attention")


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    fields.default("partial_rotary_factor", 0.25)
    forget_sections(fields)
    rope = read_rope(fields, head_dim_of(fields, 256), may_be_partial=True)
    count, period = fields.integer("num_hidden_layers", most=MAX_LAYERS), fields.integer("full_attention_interval", 4)
    types = [KINDS[(i + 1) % period > 0] for i in range(count)]
    layers = hybrid_layers(fields, "delta_net", KINDS, rope, types)
    facts = biases_of(fields)
    if architecture in PLAIN:
        fields.ignore("mlp_only_layers")
    else:
        fields.default("norm_topk_prob", True)
        shared = fields.integer("shared_expert_intermediate_size")
        facts["experts"] = read_experts(fields, shared_size=shared, shared_is_gated=True)
        fields.default("intermediate_size", 1)  # where no layer is without experts
        sparse = zip(layers, sparse_layers(fields), strict=True)
        layers = [replace(layer, has_experts=has_experts) for layer, has_experts in sparse]
    fields.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "attn_output_gate")
    fields.expect("attn_output_gate", True)
    fields.expect("output_gate_type", "swish")
    return read_decoder(
        fields,
        architecture,
        head_dim=256,
        layers=tuple(layers),
        states=_states(fields, architecture),
        qk_norm="head",
        norm_offset=1.0,
        has_output_gate=True,
        **facts,
    )


def _states(fields: ConfigFields, architecture: str) -> StateConfig:
    groups, heads = (
        fields.integer(f"linear_num_{own}_heads", n, MOST_HEADS) for own, n in (("key", 16), ("value", 32))
    )
    depth, width = (fields.integer(f"linear_{own}_head_dim", 128, MOST_DEPTH) for own in ("key", "value"))
    states = StateConfig(
        taps=fields.integer("linear_conv_kernel_dim", 4, MOST_TAPS),
        channels=2 * groups * depth + heads * width,
        num_heads=heads,
        num_groups=groups,
        depth=depth,
        width=width,
        packed=tuple(part for part in ("qkvz", "ba") if fields.flag(f"{part}_is_packed", architecture == NEXT)),
        is_tiled=fields.flag("value_heads_are_tiled"),
    )
    return check_groups(fields, "linear_num_value_heads", states)
