"""Qwen3-Next and Qwen3.5 (Qwen team, 2025 and 2026), their part for text: the gated delta rule in three of four layers, attention
with gates in the fourth; in some, experts beside an MLP of all tokens.
"""

from __future__ import annotations

from nanoengine.models.config_fields import MAX_LAYERS, ConfigFields
from nanoengine.models.families.common import biases_of, head_dim_of, read_decoder
from nanoengine.models.families.qwen import read_experts, sparse_layers
from nanoengine.models.families.routed import with_experts
from nanoengine.models.families.states import hybrid_layers, read_states
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.rope_config import read_rope, remove_sections

NEXT = "Qwen3NextForCausalLM"
PLAIN = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
ARCHITECTURES = (NEXT, *PLAIN, "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
KINDS = ("full_attention", "linear_attention")
STATE_KEYS = {
    "taps": ("linear_conv_kernel_dim", 4),
    "num_heads": ("linear_num_value_heads", 32),
    "num_groups": ("linear_num_key_heads", 16),
    "depth": ("linear_key_head_dim", 128),
    "width": ("linear_value_head_dim", 128),
}
"""Fields and defaults of the sizes of the layers with linear attention."""


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    fields.default(partial_rotary_factor=0.25)
    remove_sections(fields)
    rope = read_rope(fields, head_dim_of(fields, 256), may_be_partial=True)
    count, period = fields.integer("num_hidden_layers", most=MAX_LAYERS), fields.integer("full_attention_interval", 4)
    types = [KINDS[(i + 1) % period > 0] for i in range(count)]
    layers = hybrid_layers(fields, "delta_net", KINDS, rope, types)
    facts = biases_of(fields)
    if architecture in PLAIN:
        fields.ignore("mlp_only_layers")
    else:
        fields.default(norm_topk_prob=True)
        shared = fields.integer("shared_expert_intermediate_size")
        facts["experts"] = read_experts(fields, shared_size=shared, shared_is_gated=True)
        fields.default(intermediate_size=1)  # all layers may have experts
        layers = with_experts(layers, sparse_layers(fields))
    fields.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "attn_output_gate")
    fields.expect("attn_output_gate", True)
    fields.expect("output_gate_type", "swish")
    return read_decoder(
        fields,
        head_dim=256,
        layers=layers,
        states=read_states(
            fields,
            STATE_KEYS,
            packed=tuple(part for part in ("qkvz", "ba") if fields.flag(f"{part}_is_packed", architecture == NEXT)),
            is_tiled=fields.flag("value_heads_are_tiled"),
        ),
        qk_norm="head",
        norm_offset=1.0,
        has_output_gate=True,
        **facts,
    )
