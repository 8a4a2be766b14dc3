"""Tiny random models of every family, as transformers makes them, in the variations that their configs allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from nanoengine import LLM
from tests.support import TINY, fill_kv_with_nan, save_random

LONGROPE = {"rope_type": "longrope"}
LONGROPE |= {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7], "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 9.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 64},
    "yarn": YARN,
    "yarn, other ends": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}
    | {"beta_slow": 2.0, "attention_factor": 0.9, "truncate": False},
    "yarn, two amplitudes": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
}


def rope(name: str, theta: float = 10_000.0) -> dict[str, Any]:
    return {"rope_parameters": ROPES[name] | {"rope_theta": theta}}


def partial(fraction: float, table: dict[str, Any] | None = None) -> dict[str, Any]:
    own = {"rope_type": "default"} if table is None else table
    return {"rope_parameters": own | {"rope_theta": 1e4, "partial_rotary_factor": fraction}}


def of(family: str, *more: dict[str, Any], **options: Any) -> tuple[str, dict[str, Any]]:
    """A family, and options of its config."""
    for other in more:
        options |= other
    return family, options


def heads(num: int, num_kv: int | None) -> dict[str, Any]:
    return {"num_attention_heads": num, "num_key_value_heads": num_kv}


def experts(num: int, chosen: int) -> dict[str, Any]:
    return {"num_local_experts": num, "num_experts_per_tok": chosen}


def types(*kinds: str) -> dict[str, Any]:
    return {"layer_types": [f"{kind}_attention" for kind in kinds]}


def types_of(more: dict[str, Any], *kinds: str) -> dict[str, Any]:
    return more | {"layer_types": list(kinds), "num_hidden_layers": len(kinds)}


HYBRID: dict[str, Any] = {"pad_token_id": None}
# A larger epsilon than theirs: the norm of what a recurrence says makes much of its rounding where it is small. The two ways of
# transformers to compute it then differ by 2e-4.
DELTA = {"rms_norm_eps": 1e-2}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
STATES = HYBRID | {"mamba_n_heads": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
MAMBA: dict[str, Any] = types_of(STATES, "linear_attention", "full_attention", "linear_attention")
MAMBA |= {"attention_multiplier": 0.2, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
FACTORS: dict[str, Any] = {f"{own}_multiplier": 0.5 for own in ("attention_in", "attention_out", "ssm_out", "lm_head")}
FACTORS |= {"embedding_multiplier": 3.0, "ssm_in_multiplier": 1.2, "mlp_multipliers": [0.9, 0.6]}
FACTORS |= {"ssm_multipliers": [1.1, 0.8, 0.7, 0.6, 0.5], "mamba_norm_before_gate": False}
# No step of time is below the shortest, which transformers takes for some prompts, and for no token behind them.
NEMOTRON: dict[str, Any] = {"num_hidden_layers": None, "time_step_min": 1e-6, "head_dim": 16, "chunk_size": 16}
NEMOTRON |= {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16}
NEMOTRON |= {"rescale_prenorm_residual": False}
BIASES = {"attention_bias": True, "mlp_bias": True}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
GEMMA4 = {"head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
GEMMA4 |= {"hidden_size_per_layer_input": 0, "sliding_window": 13}
ROUTED: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 3, "num_hidden_layers": 3}
GROUPED = ROUTED | {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
UNTIED = {"tie_word_embeddings": False}
UNEQUAL = {"norm_topk_prob": False, "shared_expert_intermediate_size": 40}
WINDOWED = {"use_sliding_window": True}
CHUNKS = {"intermediate_size_mlp": 44, "floor_scale": 7, "attn_scale": 0.3}
BY_TYPE = {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}
BY_TYPE = {kind: table | {"rope_theta": 5e5} for kind, table in BY_TYPE.items()}
GROWING = YARN | {"rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 16.0}
GROWING = {"rope_parameters": GROWING | {"llama_4_scaling_beta": 0.3}}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": of("Llama", head_dim=16),
    "Llama, untied, odd heads": of("Llama", UNTIED, heads(3, 1), head_dim=16),
    "Llama, no groups, odd sizes": of("Llama", heads(3, None), hidden_size=39, head_dim=10, intermediate_size=53),
    "Llama, all biases": of("Llama", BIASES),
    "Phi3, half rotated": of("Phi3", heads(3, 1), partial(0.5), original_max_position_embeddings=512),
    "SmolLM2's shape": of("Llama", heads(9, 3), hidden_size=72, head_dim=32, rms_norm_eps=1e-5),
    **{f"Llama, rope {name}": of("Llama", rope(name), head_dim=16, max_position_embeddings=256) for name in ROPES},
    "Mistral, no window": of("Mistral", sliding_window=None, head_dim=20),
    "Mistral, a wide window": of("Mistral", UNTIED, sliding_window=512, head_dim=32),
    "Qwen2": of("Qwen2", UNTIED),
    "Qwen2, tied, 7 heads": of("Qwen2", heads(7, 1), hidden_size=112),
    "Qwen3, yarn": of("Qwen3", rope("yarn", 1e6), head_dim=32),
    "SmolLM3": of("SmolLM3", num_hidden_layers=5, head_dim=16),
    "SmolLM3, others without rotation": of(
        "SmolLM3", BIASES, num_hidden_layers=3, head_dim=32, no_rope_layers=[0, 1, 0]
    ),
    "Phi3": of("Phi3", UNTIED, original_max_position_embeddings=512),
    "Phi3, partial, long factors": of(
        "Phi3", heads(4, 2), partial(0.75, LONGROPE), hidden_size=64, original_max_position_embeddings=40
    ),
    "Phi3, partial, short factors": of(
        *("Phi3", heads(4, 4), partial(0.75, LONGROPE), {"hidden_size": 64}),
        original_max_position_embeddings=256,
        tests_max_len=256,
    ),
    "Granite": of(
        *("Granite", {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.4}),
        logits_scaling=2.5,
        head_dim=16,
    ),
    "Granite, biases": of("Granite", BIASES, attention_multiplier=0.3),
    "Granite-MoE, shared": of("GraniteMoeShared", experts(5, 2), shared_intermediate_size=32, attention_multiplier=0.3),
    "OLMo2": of("Olmo2", UNTIED),
    "OLMo2, biases, no groups": of("Olmo2", heads(3, 3), attention_bias=True),
    "Mixtral": of("Mixtral", experts(5, 2), sliding_window=None),
    "Qwen3-MoE": of("Qwen3Moe", EXPERTS, head_dim=32, attention_bias=True),
    "Qwen3-MoE, some layers dense": of(
        *("Qwen3Moe", EXPERTS, {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
        {"head_dim": 16, "norm_topk_prob": False, "num_experts_per_tok": 1},
    ),
    "Qwen2-MoE": of("Qwen2Moe", EXPERTS, WINDOWED, types("sliding", "full"), UNEQUAL, sliding_window=16),
    # Windows below, at and beyond a block of 16, prompts of 40 and 57, and all of 75 tokens; full layers first, last, none.
    "Mistral, a window": of("Mistral", sliding_window=13, head_dim=16),
    "Mistral, a window of the token alone": of("Mistral", sliding_window=1, head_dim=16),
    "Phi3, a window of a block": of(
        "Phi3", heads(3, 1), partial(0.5), original_max_position_embeddings=512, sliding_window=16
    ),
    "Qwen2, the first full": of("Qwen2", WINDOWED, num_hidden_layers=3, max_window_layers=1, sliding_window=20),
    "Qwen3, the last full": of(
        "Qwen3", WINDOWED, types("sliding", "sliding", "full"), num_hidden_layers=3, head_dim=16, sliding_window=33
    ),
    "Qwen3-MoE, a window": of("Qwen3Moe", EXPERTS, WINDOWED, head_dim=16, sliding_window=17),
    "SmolLM3, windows where nothing rotates": of(
        "SmolLM3", WINDOWED, num_hidden_layers=4, head_dim=16, sliding_window=10, no_rope_layers=[0, 1, 1, 0]
    ),
    "OLMo3, windows": of("Olmo3", num_hidden_layers=5, sliding_window=9),
    "Gemma2": of(
        *("Gemma2", {"num_hidden_layers": 3, "head_dim": 32, "sliding_window": 11, "query_pre_attn_scalar": 24}),
        attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0,
    ),
    "Gemma2, no caps, biases": of(
        *("Gemma2", UNTIED, {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        head_dim=16,
        attention_bias=True,
        sliding_window=50,
    ),
    "Gemma3": of(
        *("Gemma3", {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 20, "query_pre_attn_scalar": 20}),
        rope_parameters={"full_attention": ROPES["linear"], "sliding_attention": {"rope_type": "default"}},
    ),
    "Gemma3, a cap, odd sizes, no full layer": of(
        "Gemma3", head_dim=10, intermediate_size=53, sliding_window=5, final_logit_softcapping=6.0
    ),
    "Gemma4": of("Gemma4", GEMMA4, num_hidden_layers=12, final_logit_softcapping=5.0),
    "Gemma4, inputs of each layer, shared K and V": of(
        *("Gemma4", GEMMA4, UNTIED, heads(4, 1), types(*["sliding", "full"] * 3)),
        {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "attention_k_eq_v": False},
        {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": TINY["vocab_size"]},
    ),
    "Gemma4, experts": of(
        *("Gemma4", GEMMA4, types("full", "sliding", "full"), {"num_hidden_layers": 3, "enable_moe_block": True}),
        {"num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24},
    ),
    "Gemma4, unified": of(
        "Gemma4Unified", GEMMA4 | {"attention_k_eq_v": False}, num_hidden_layers=3, attention_bias=True
    ),
    "gpt-oss": of("GptOss", experts(5, 2), num_hidden_layers=3, head_dim=16, sliding_window=18, intermediate_size=36),
    "gpt-oss, full layers, no biases": of(
        "GptOss", UNTIED, experts(4, 4), types("full", "full"), head_dim=16, attention_bias=False, swiglu_limit=7.0
    ),
    # Hybrids: layers with states in place of attention.
    "LFM2": of("Lfm2", types_of(HYBRID, "conv", "conv", "full_attention", "conv"), block_auto_adjust_ff_dim=False),
    "LFM2, biases, four taps, adjusted": of(
        *("Lfm2", UNTIED, heads(3, 1), types_of(HYBRID, "full_attention", "conv"), {"conv_bias": True}),
        conv_L_cache=4,
        block_multiple_of=16,
        block_ffn_dim_multiplier=1.3,
    ),
    "Qwen3.5": of("Qwen3_5", DELTA, num_hidden_layers=4, head_dim=32),
    "Qwen3.5, odd sizes": of(
        *("Qwen3_5", DELTA, UNTIED, heads(3, 1), {"linear_value_head_dim": 10, "linear_key_head_dim": 6}),
        num_hidden_layers=3,
        head_dim=16,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        linear_conv_kernel_dim=2,
        linear_num_value_heads=2,
    ),
    "Qwen3-Next": of("Qwen3Next", DELTA, EXPERTS, num_hidden_layers=4, head_dim=16, shared_expert_intermediate_size=40),
    "Qwen3.5-MoE": of(
        "Qwen3_5Moe", DELTA, EXPERTS, num_hidden_layers=4, head_dim=32, shared_expert_intermediate_size=24
    ),
    "Granite 4": of("GraniteMoeHybrid", MAMBA, experts(5, 2), head_dim=12),
    "Granite 4, dense, rotated": of(
        "GraniteMoeHybrid",
        MAMBA,
        {"num_local_experts": 0, "mamba_n_groups": 2, "mamba_proj_bias": True},
        position_embedding_type="rope",
    ),
    "Bamba": of("Bamba", UNTIED, STATES, num_hidden_layers=3, attn_layer_indices=[1], head_dim=16, mlp_bias=True),
    "Falcon H1": of(
        *("FalconH1", STATES, FACTORS, {"head_dim": 16, "mamba_n_groups": 2, "mamba_n_heads": 4, "mamba_d_ssm": 64}),
        mamba_rms_norm=True,
    ),
    "Falcon H1, without norms, untied": of("FalconH1", UNTIED, STATES, FACTORS, mamba_d_ssm=40, key_multiplier=0.7),
    "Nemotron-H": of(
        *("NemotronH", UNTIED, NEMOTRON, {"layers_block_type": ["mlp", "mamba", "attention", "mamba", "mlp"]}),
        mlp_bias=True,
        use_bias=True,
    ),
    "Nemotron 3": of(
        *("NemotronH", NEMOTRON, GROUPED, UNTIED, {"moe_shared_expert_intermediate_size": 40}),
        layers_block_type=["moe", "mamba", "moe", "attention", "mamba", "moe"],
        num_hidden_layers=None,
    ),
    "Nemotron 3, experts of latents": of(
        *("NemotronH", NEMOTRON, ROUTED, UNTIED, {"layers_block_type": ["mamba", "moe", "attention", "mlp"]}),
        moe_shared_expert_intermediate_size=24,
        moe_latent_size=32,
        n_routed_experts=6,
        num_hidden_layers=None,
    ),
    "Llama 4": of("Llama4", experts(5, 1), CHUNKS, UNTIED, num_hidden_layers=5, head_dim=16, attention_chunk_size=13),
    "Llama 4, dense between, biases, llama3": of(
        *("Llama4", experts(3, 1), CHUNKS, rope("llama3"), heads(3, 1), {"num_hidden_layers": 4, "head_dim": 32}),
        attention_bias=True,
        interleave_moe_layer_step=2,
        attention_chunk_size=16,
        max_position_embeddings=256,
    ),
    "Llama 4, full layers, no norms, no experts": of(
        *("Llama4", experts(2, 1), CHUNKS, {"attention_chunk_size": None, "use_qk_norm": False, "moe_layers": []}),
        no_rope_layers=[1, 0],
        head_dim=16,
        attn_temperature_tuning=False,
    ),
    "LFM2-MoE": of("Lfm2Moe", ROUTED, types_of(HYBRID, "conv", "conv", "full_attention", "conv"), num_experts=6),
    "LFM2-MoE, no bias, untied": of(
        *("Lfm2Moe", UNTIED, ROUTED, types_of(HYBRID, "full_attention", "conv"), {"num_experts": 5, "conv_bias": True}),
        num_dense_layers=0,
        use_expert_bias=False,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
    ),
    "GLM-4.5": of("Glm4Moe", ROUTED, partial(0.5), n_routed_experts=6, head_dim=16, attention_bias=True),
    "GLM-4.6, groups, norms": of("Glm4Moe", UNTIED, GROUPED, partial(0.25), head_dim=32, use_qk_norm=True),
    "MiniMax-M2": of("MiniMaxM2", experts(6, 2), partial(0.5), UNTIED, head_dim=16),
    "ERNIE 4.5": of("Ernie4_5_Moe", ROUTED, moe_num_experts=6, moe_k=3, moe_num_shared_experts=2, head_dim=16),
    "ERNIE 4.5, some layers, none shared": of(
        *("Ernie4_5_Moe", ROUTED, {"num_hidden_layers": 5, "moe_num_experts": 4, "moe_k": 2}),
        moe_num_shared_experts=0,
        moe_layer_interval=2,
        moe_layer_end_index=2,
    ),
    "dots1, groups, a window": of(
        "Dots1",
        GROUPED,
        types("full", "sliding", "full"),
        n_shared_experts=2,
        first_k_dense_replace=1,
        sliding_window=9,
    ),
    "Qwen2-MoE, untied": of("Qwen2Moe", EXPERTS, UNTIED, shared_expert_intermediate_size=40, norm_topk_prob=False),
    "Qwen2-MoE, windows, some layers dense": of(
        *("Qwen2Moe", EXPERTS, WINDOWED, {"num_hidden_layers": 4, "max_window_layers": 3, "sliding_window": 11}),
        mlp_only_layers=[1],
        shared_expert_intermediate_size=24,
    ),
    "Granite-MoE": of(
        *("GraniteMoe", experts(5, 2), {"attention_multiplier": 0.2, "embedding_multiplier": 2.0}),
        residual_multiplier=0.5,
        logits_scaling=2.0,
    ),
    "Granite-MoE, a shared MLP": of("GraniteMoeShared", experts(4, 2), shared_intermediate_size=24),
    "OLMo3, yarn where all is seen": of("Olmo3", num_hidden_layers=5, sliding_window=600, rope_parameters=BY_TYPE),
    "Granite 4, attention alone": of(
        *("GraniteMoeHybrid", MAMBA, types_of(HYBRID, "full_attention", "full_attention"), {"num_local_experts": 0}),
        position_embedding_type="rope",
    ),
    "Granite 4, states alone": of(
        "GraniteMoeHybrid", MAMBA, experts(3, 1), types_of(HYBRID, "linear_attention", "linear_attention")
    ),
    "Ministral 3": of("Ministral3", GROWING, heads(3, 1), head_dim=16),
    "Seed-OSS": of("SeedOss", UNTIED, {"attention_out_bias": True, "mlp_bias": True}, head_dim=16),
    "GLM-4, 2024": of("Glm", partial(0.75), head_dim=16),
    "GLM-4": of("Glm4", UNTIED, heads(3, 1), head_dim=20),
    "EXAONE 4": of("Exaone4", num_hidden_layers=5, sliding_window=11, head_dim=16),
    "EXAONE 4, no windows": of("Exaone4", rope("llama3"), types("full", "full"), sliding_window=None, head_dim=16),
    "Ernie 4.5": of("Ernie4_5", heads(3, 1), use_bias=True, head_dim=20),
    "Hunyuan": of("HunYuanDenseV1", UNTIED, head_dim=16),
    "Hunyuan, alpha": of(
        *("HunYuanDenseV1", {"attention_bias": True, "head_dim": 32}),
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
    ),
}


PIXTRAL = {"model_type": "pixtral"}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [2, 3, 1]}}
SEEING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Llama4": ("Llama 4", {}, {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}),
    "Gemma3": ("Gemma3", {"mm_tokens_per_image": 4, "tie_word_embeddings": False}, {"patch_size": 14}),
    "Mistral3": ("Mistral, a wide window", {"text_config": {"model_type": "mistral"}}, PIXTRAL),
    "Mistral3, Ministral 3": ("Ministral 3", UNTIED | {"text_config": {"model_type": "ministral3"}}, PIXTRAL),
    "Qwen2VL": ("Qwen2, the first full", {"text_config": SECTIONS | {"use_sliding_window": False}}, {"embed_dim": 48}),
    "Qwen2_5_VL": ("Qwen2, the first full", {"text_config": SECTIONS}, {"out_hidden_size": 48}),
    "Qwen3VL": ("Qwen3, yarn", {"tie_word_embeddings": True}, {"out_hidden_size": 48, "deepstack_visual_indexes": [0]}),
    "Qwen3VLMoe": ("Qwen3-MoE", {}, {"out_hidden_size": 48, "deepstack_visual_indexes": [0]}),
    "Qwen3_5": ("Qwen3.5", {}, {"out_hidden_size": 48}),
    "Qwen3_5Moe": ("Qwen3.5-MoE", {}, {"out_hidden_size": 48}),
}
"""Models that see pictures: the shape of their part for text, what stands beside it, and what their part for pictures needs."""


HYBRIDS = (
    *("Lfm2", "Lfm2Moe", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe"),
    *("GraniteMoeHybrid", "Bamba", "NemotronH", "FalconH1"),
)
WITH_STATES = [shape for shape, (family, _) in SHAPES.items() if family in HYBRIDS and "attention alone" not in shape]
"""Shapes with layers that have states in place of attention."""


def engine(folder: Path, **options: Any) -> LLM:
    """An engine whose KV pool is full of NaN."""
    llm = LLM(str(folder), use_tqdm=False, **{"num_kv_blocks": 100, "device": "cpu", "dtype": "float32"} | options)
    fill_kv_with_nan(llm)
    return llm


def family_checkpoint(folder: Path, shape: str, seed: int = 0, **overrides: Any) -> Path:
    """A random checkpoint of the shape of that name."""
    family, options = SHAPES[shape]
    torch.manual_seed(seed)
    # Families choose what TINY does not: rotations and heads.
    theirs = ("rope_theta", "head_dim", "attention_bias")
    merged = {key: value for key, value in TINY.items() if key not in theirs} | options
    merged |= {"dtype": "float32", "pad_token_id": None} | overrides
    merged.pop("tests_max_len", None)
    model = getattr(transformers, f"{family}ForCausalLM")
    return save_random(model(model.config_class(**merged)).eval(), folder)
