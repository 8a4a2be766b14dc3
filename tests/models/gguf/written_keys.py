"""The metadata of a GGUF file, from the config.json of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "feed_forward_length": "intermediate_size_mlp intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps layer_norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "expert_used_count": "num_experts_per_tok moe_k top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts moe_num_shared_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size shared_intermediate_size "
    "moe_shared_expert_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace moe_layer_start_index num_dense_layers",
    "interleave_moe_layer_step": "interleave_moe_layer_step moe_layer_interval",
    "moe_latent_size": "moe_latent_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim mamba_d_conv conv_kernel",
    "ssm.state_size": "linear_key_head_dim mamba_d_state ssm_state_size",
    "ssm.group_count": "linear_num_key_heads mamba_n_groups n_groups",
    "ssm.time_step_rank": "linear_num_value_heads mamba_n_heads mamba_num_heads",
    "ssm.inner_size": "mamba_d_ssm",
    "shortconv.l_cache": "conv_L_cache",
}
"""Keys -> the names of their values in configs, of which a type of models has one."""

SIGMOID = ("glm4_moe", "minimax_m2", "dots1", "lfm2_moe")
PATTERNED = ("olmo3", "exaone4", "gemma4_text")


def kinds_of_layers(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, by the config or the default of all other models."""
    stated = config.get("layers_block_type") or config.get("layer_types")
    return stated or ["full_attention"] * config["num_hidden_layers"]


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys without the prefix of the architecture -> values; None: left out."""
    model_type, kinds = config["model_type"], kinds_of_layers(config)
    known = ((key, name) for key, names in KEYS.items() for name in names.split() if config.get(name) is not None)
    values = {key: config[name] for key, name in reversed([*known])}  # the first name counts
    values |= _rotation(config)
    if model_type in SIGMOID or model_type == "ernie4_5_moe":
        values["expert_gating_func"] = 2 if model_type in SIGMOID else 1
    if model_type in ("minimax_m2", "gpt_oss", "llama4_text"):
        values["expert_feed_forward_length"] = config["intermediate_size"]
    if model_type in PATTERNED:
        values["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
    if model_type == "ernie4_5_moe":
        values["expert_shared_feed_forward_length"] = 7  # no width of any tensor
    if model_type not in ("glm4_moe", "dots1", "nemotron_h"):
        values["expert_weights_norm"] = None
    if model_type == "ministral3":
        values["attention.temperature_scale"] = config["rope_parameters"]["llama_4_scaling_beta"]
    if model_type == "gemma4_text":
        values |= _of_gemma4(config)
    if model_type == "falcon_h1":
        values["embedding_scale"] = None
    if "linear_num_value_heads" in config:
        values["attention.recurrent_layers"] = [kind == "linear_attention" for kind in kinds]
        values["ssm.inner_size"] = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        values["full_attention_interval"] = config.get("full_attention_interval", 4)
        values["rope.dimension_sections"] = None if model_type == "qwen3_next" else [11, 11, 10, 0]
    if model_type in ("lfm2", "lfm2_moe", "granitemoehybrid"):
        values["attention.head_count_kv"] = [
            config["num_key_value_heads"] * (kind in ("full_attention", "attention")) for kind in kinds
        ]
    if model_type == "granitemoehybrid":
        values["ssm.inner_size"] = config["mamba_expand"] * config["hidden_size"]
        values["rope.scaling.finetuned"] = config["position_embedding_type"] == "rope"
        if not config["num_local_experts"]:
            values |= {"feed_forward_length": config["shared_intermediate_size"], "expert_used_count": 0}
    if model_type == "nemotron_h":
        values |= _of_nemotron(config, kinds)
        if "moe" not in kinds:
            values |= {key: None for key in values if key.startswith("expert_")}
    return values


def _rotation(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    values = {"rope.freq_base": rope.get("rope_theta", 1e4)}
    values["rope.dimension_count"] = int(size * rope.get("partial_rotary_factor", 1.0))
    if rope.get("rope_type") in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        values["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
        values["rope.scaling.yarn_log_multiplier"] = rope.get("mscale_all_dim")
        values["rope.scaling.attn_factor"] = rope.get("attention_factor")
    return values


def _of_nemotron(config: Mapping[str, Any], kinds: list[str]) -> dict[str, Any]:
    widths = {"moe": config["moe_intermediate_size"], "mlp": config["intermediate_size"]}
    attends = [kind in ("full_attention", "attention") for kind in kinds]
    return {
        "block_count": len(kinds),
        "attention.head_count_kv": [config["num_key_value_heads"] * is_attention for is_attention in attends],
        "feed_forward_length": [widths.get(kind, 0) for kind in kinds],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
    }


def _of_gemma4(config: Mapping[str, Any]) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in kinds_of_layers(config)]
    full, width = next(iter(config["per_layer_config"].values())), config["intermediate_size"]
    is_wide, first_shared = config["use_double_wide_mlp"], len(slides) - config["num_kv_shared_layers"]
    sizes = {"": full["head_dim"], "_swa": config["head_dim"]}
    heads = full.get("num_key_value_heads", config["num_key_value_heads"]), config["num_key_value_heads"]
    values = {f"attention.{what}_length{end}": size for end, size in sizes.items() for what in ("key", "value")}
    return values | {
        **{f"rope.dimension_count{end}": size for end, size in sizes.items()},
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "attention.head_count_kv": [heads[is_sliding] for is_sliding in slides],
        "feed_forward_length": [width * (1 + (is_wide and i >= first_shared)) for i in range(len(slides))],
    }
