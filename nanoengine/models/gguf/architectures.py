"""Architectures of llama.cpp: Hugging Face's names of each architecture and of its keys.

Keys: https://github.com/ggml-org/llama.cpp, src/llama-arch.cpp and conversion/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from nanoengine.models.gguf.rope import EPSILON


class Architecture(NamedTuple):
    """An architecture: its names at Hugging Face's, and its keys."""

    name: str  # Hugging Face's
    model_type: str
    keys: Mapping[str, str] = {}  # keys beside COMMON_KEYS -> names at Hugging Face's
    fixed: Mapping[str, Any] = {}  # fields of the config that its files do not state


COMMON_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    EPSILON: "rms_norm_eps",
}
"""Keys that every file must have."""

MIXTURE_KEYS = {"expert_used_count": "num_experts_per_tok", "expert_count": "num_local_experts"}
MINIMAX_KEYS = MIXTURE_KEYS | {"expert_feed_forward_length": "moe_intermediate_size"}
QWEN_MOE_KEYS = MINIMAX_KEYS | {"expert_count": "num_experts"}
SHARED_EXPERT = "expert_shared_feed_forward_length"
QWEN_SHARED_KEYS = QWEN_MOE_KEYS | {SHARED_EXPERT: "shared_expert_intermediate_size"}
DENSE_LAYERS = "leading_dense_block_count"
DEEPSEEK_KEYS = MINIMAX_KEYS | {"expert_count": "n_routed_experts", DENSE_LAYERS: "first_k_dense_replace"}
ERNIE_KEYS = MINIMAX_KEYS | {
    "expert_count": "moe_num_experts",
    DENSE_LAYERS: "moe_layer_start_index",
    "interleave_moe_layer_step": "moe_layer_interval",
}
LFM2_KEYS = {"shortconv.l_cache": "conv_L_cache"}
LFM2_MOE_KEYS = LFM2_KEYS | QWEN_MOE_KEYS | {DENSE_LAYERS: "num_dense_layers"}


def _state_keys(conv_kernel: str, state_size: str, groups: str, heads: str) -> dict[str, str]:
    """Sizes of layers with recurrent states, by Hugging Face's names."""
    return {
        "ssm.conv_kernel": conv_kernel,
        "ssm.state_size": state_size,
        "ssm.group_count": groups,
        "ssm.time_step_rank": heads,
    }


DELTA_KEYS = {"full_attention_interval": "full_attention_interval"} | _state_keys(
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads"
)
MAMBA_KEYS = _state_keys("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads")
NEMOTRON_KEYS = _state_keys("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads")
NEMOTRON_MOE_KEYS = {
    **NEMOTRON_KEYS,
    **MINIMAX_KEYS,
    "expert_count": "n_routed_experts",
    SHARED_EXPERT: "moe_shared_expert_intermediate_size",
    "moe_latent_size": "moe_latent_size",
}
WINDOW = "attention.sliding_window"
WINDOW_KEYS = {WINDOW: "sliding_window"}
GRANITE_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GRANITE_MOE_KEYS = GRANITE_KEYS | MIXTURE_KEYS | {SHARED_EXPERT: "shared_intermediate_size"}
GEMMA_KEYS = WINDOW_KEYS | {"final_logit_softcapping": "final_logit_softcapping"}
GEMMA2_KEYS = GEMMA_KEYS | {"attn_logit_softcapping": "attn_logit_softcapping"}
GEMMA4_KEYS = GEMMA_KEYS | {
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
MIXED = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
IS_SPLIT = {"linears_are_split": True}
"""A field that Hugging Face lacks: matrices that its files stack in one tensor have a tensor each here, under the usual names."""

GROWTH = "attention.temperature_scale"
VARIANTS = {
    "llama": "expert_count",
    "mistral3": GROWTH,
    "olmo2": WINDOW,
    "granitemoe": SHARED_EXPERT,
}
"""Architectures that stand for two of Hugging Face's -> the key that only the second has."""

LLAMA = Architecture("LlamaForCausalLM", "llama")
QWEN2, QWEN3 = Architecture("Qwen2ForCausalLM", "qwen2"), Architecture("Qwen3ForCausalLM", "qwen3")
QWEN3_MOE = Architecture("Qwen3MoeForCausalLM", "qwen3_moe", QWEN_MOE_KEYS, MIXED)
OLMO3 = Architecture("Olmo3ForCausalLM", "olmo3", WINDOW_KEYS)
GPT_OSS_KEYS = WINDOW_KEYS | MIXTURE_KEYS | {"expert_feed_forward_length": "intermediate_size"}
GPT_OSS = Architecture("GptOssForCausalLM", "gpt_oss", GPT_OSS_KEYS, IS_SPLIT)
ARCHITECTURES = {
    "llama": LLAMA,
    "llama with expert_count": Architecture("MixtralForCausalLM", "mixtral", MIXTURE_KEYS),
    "llama4": Architecture(
        "Llama4ForCausalLM",
        "llama4_text",
        MIXTURE_KEYS
        | {"feed_forward_length": "intermediate_size_mlp", "expert_feed_forward_length": "intermediate_size"}
        | {"interleave_moe_layer_step": "interleave_moe_layer_step", WINDOW: "attention_chunk_size"}
        | {"attention.chunk_size": "attention_chunk_size"},  # Ollama's
        IS_SPLIT | {"attention_chunk_size": 8192},
    ),
    "mistral3": LLAMA,
    f"mistral3 with {GROWTH}": Architecture("Ministral3ForCausalLM", "ministral3"),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3"),
    "qwen2": QWEN2,
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", QWEN_SHARED_KEYS, MIXED | {"norm_topk_prob": False}),
    "qwen2vl": QWEN2,
    "qwen25vl": QWEN2,  # Ollama's name
    "qwen3": QWEN3,
    "qwen3moe": QWEN3_MOE,
    "qwen3vl": QWEN3,
    "qwen3vlmoe": QWEN3_MOE,
    "phi3": Architecture("Phi3ForCausalLM", "phi3", WINDOW_KEYS),
    "granite": Architecture("GraniteForCausalLM", "granite", GRANITE_KEYS),
    "granitemoe": Architecture("GraniteMoeForCausalLM", "granitemoe", GRANITE_KEYS | MIXTURE_KEYS, IS_SPLIT),
    f"granitemoe with {SHARED_EXPERT}": Architecture(
        "GraniteMoeSharedForCausalLM", "granitemoeshared", GRANITE_MOE_KEYS, IS_SPLIT
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2"),
    f"olmo2 with {WINDOW}": OLMO3,
    "olmo3": OLMO3,  # Ollama's name
    "gpt-oss": GPT_OSS,
    "gptoss": GPT_OSS,  # Ollama's name
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", GEMMA2_KEYS),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", GEMMA_KEYS),
    "gemma4": Architecture("Gemma4ForCausalLM", "gemma4_text", GEMMA4_KEYS),
    "seed_oss": Architecture("SeedOssForCausalLM", "seed_oss"),
    "glm4": Architecture("Glm4ForCausalLM", "glm4", fixed={"partial_rotary_factor": 1.0}),
    "exaone4": Architecture("Exaone4ForCausalLM", "exaone4", WINDOW_KEYS, {"sliding_window": None}),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5"),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "lfm2": Architecture("Lfm2ForCausalLM", "lfm2", LFM2_KEYS, {"block_auto_adjust_ff_dim": False}),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", "lfm2_moe", LFM2_MOE_KEYS),
    "glm4moe": Architecture("Glm4MoeForCausalLM", "glm4_moe", DEEPSEEK_KEYS),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", "minimax_m2", MINIMAX_KEYS),
    "ernie4_5-moe": Architecture("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", ERNIE_KEYS),
    "dots1": Architecture("Dots1ForCausalLM", "dots1", DEEPSEEK_KEYS, {"sliding_window": None}),
    "qwen3next": Architecture("Qwen3NextForCausalLM", "qwen3_next", DELTA_KEYS | QWEN_SHARED_KEYS, MIXED),
    "qwen35": Architecture("Qwen3_5ForCausalLM", "qwen3_5_text", DELTA_KEYS),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", DELTA_KEYS | QWEN_SHARED_KEYS, MIXED),
    "falcon-h1": Architecture("FalconH1ForCausalLM", "falcon_h1", MAMBA_KEYS | {"ssm.inner_size": "mamba_d_ssm"}),
    "nemotron_h": Architecture("NemotronHForCausalLM", "nemotron_h", NEMOTRON_KEYS),
    "nemotron_h_moe": Architecture("NemotronHForCausalLM", "nemotron_h", NEMOTRON_MOE_KEYS),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", GRANITE_MOE_KEYS | MAMBA_KEYS, IS_SPLIT
    ),
}
"""Architectures by llama.cpp's names."""
