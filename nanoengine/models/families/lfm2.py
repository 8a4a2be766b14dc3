"""LFM2 (Liquid AI, 2025): short convolutions in most layers, attention in the others; LFM2-MoE: experts after the first."""

from __future__ import annotations

from typing import Any

from nanoengine.models.config_fields import MAX_LAYERS, ConfigFields
from nanoengine.models.families.common import head_dim_of, read_decoder
from nanoengine.models.families.routed import routed_experts, sparse_after, with_experts
from nanoengine.models.families.states import MAX_TAPS, hybrid_layers
from nanoengine.models.model_config import ExpertsConfig, ModelConfig, StateConfig, TensorNames
from nanoengine.models.rope_config import read_rope

MOE = "Lfm2MoeForCausalLM"
ARCHITECTURES = ("Lfm2ForCausalLM", MOE)

NAMES = TensorNames(
    norm_before_attention="operator_norm",
    norm_before_mlp="ffn_norm",
    experts="feed_forward",
    expert_gate_up_down=("w1", "w3", "w2"),
    replaced=(
        (".self_attn.o_proj.", ".self_attn.out_proj."),
        (".q_norm.", ".q_layernorm."),
        (".k_norm.", ".k_layernorm."),
        (".mlp.gate_proj.", ".feed_forward.w1."),
        (".mlp.up_proj.", ".feed_forward.w3."),
        (".mlp.down_proj.", ".feed_forward.w2."),
        (".gate.e_score_correction_bias", ".expert_bias"),
        ("model.norm.", "model.embedding_norm."),
    ),
)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    is_tied, eps = fields.get("tie_embedding", True), fields.get("norm_eps", 1e-5)
    fields.default(intermediate_size=fields.get("block_ff_dim"), tie_word_embeddings=is_tied, rms_norm_eps=eps)
    fields.ignore("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "num_heads")
    fields.ignore("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init")
    fields.expect("block_use_swiglu", True)
    count = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    types = None
    if fields.get("full_attn_idxs") is not None:
        attending = fields.layers("full_attn_idxs")
        types = ["full_attention" if number in attending else "conv" for number in range(count)]
    rope = read_rope(fields, head_dim_of(fields), 1e6)
    bias, hidden = fields.flag("conv_bias"), fields.integer("hidden_size")
    taps = fields.integer("conv_L_cache", 3, MAX_TAPS)
    states = StateConfig(taps=taps, channels=hidden, conv_bias=bias, proj_bias=bias)
    layers = hybrid_layers(fields, "short_conv", ("full_attention", "conv"), rope, types)
    facts: dict[str, Any] = {"eps": 1e-5, "tied": True, "states": states, "qk_norm": "head", "names": NAMES}
    if architecture == MOE:
        layers = with_experts(layers, sparse_after(fields, "num_dense_layers", 2))
        return read_decoder(fields, layers=layers, experts=_experts(fields), **facts)
    return read_decoder(fields, layers=layers, intermediate_size=_mlp_width(fields), **facts)


def _experts(fields: ConfigFields) -> ExpertsConfig:
    fields.default(norm_topk_prob=True)
    facts: dict[str, Any] = {} if fields.flag("use_expert_bias", True) else {"bias_shape": ()}
    return routed_experts(fields, "num_experts", added_to_sum=1e-6, **facts)


def _mlp_width(fields: ConfigFields) -> int:
    """Two thirds of `intermediate_size` times a factor, rounded up to a multiple; or `intermediate_size` itself."""
    stated = fields.integer("intermediate_size")
    multiple = fields.integer("block_multiple_of", 256)
    factor = fields.number("block_ffn_dim_multiplier", 1.0, most=1e6)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return stated
    return -(-int(factor * int(2 * stated / 3)) // multiple) * multiple
