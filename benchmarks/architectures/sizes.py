"""The sizes of the tiny checkpoints: those of all architectures, and what single ones need besides."""

from __future__ import annotations

from typing import Any

VOCABULARY, LAYERS, WINDOW = 4096, 4, 16

_SIZES: tuple[tuple[int, str], ...] = (
    (VOCABULARY, "vocab_size vocab_size_per_layer_input tgt_vocab_size text_vocab_size"),
    (0, "pad_token_id bos_token_id eos_token_id"),
    # width
    (64, "hidden_size n_embd d_model embedding_size lru_width input_embedding_size output_embedding_size emb_dim"),
    (128, "intermediate_size n_inner ffn_dim ffn_hidden_size hidden_dim d_ff dff dim_ff d_inner feed_forward_size"),
    (128, "decoder_ffn_dim encoder_ffn_dim intermediate_size_mlp dense_intermediate_size"),
    # depth
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers depth"),
    (2, "encoder_layers num_encoder_layers"),
    # attention
    (4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"),
    (2, "num_key_value_heads num_global_key_value_heads swa_num_key_value_heads"),
    (16, "head_dim global_head_dim swa_head_dim kv_channels attention_head_size rope_dim query_pre_attn_scalar"),
    (8, "rotary_dim"),
    (512, "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length max_target_positions"),
    (WINDOW, "sliding_window sliding_window_size window_size attention_window_size local_attention"),
    (WINDOW, "attention_chunk_size block_size"),
    (2, "max_window_layers"),
    # latent attention and its index
    (16, "kv_lora_rank v_head_dim qk_nope_head_dim index_head_dim index_n_heads"),
    (32, "q_lora_rank"),
    (8, "qk_rope_head_dim index_topk"),
    (24, "qk_head_dim"),
    # experts
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token top_k_experts moe_k moe_topk"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size"),
    (32, "moe_shared_expert_intermediate_size shared_experts_intermediate_size"),
    (1, "n_group topk_group num_expert_group num_limited_groups"),
    (1, "first_k_dense_replace num_dense_layers moe_layer_start_index"),
    # layers with states
    (1, "mamba_n_groups n_groups"),
    (2, "linear_num_key_heads mamba_expand expand"),
    (3, "conv_L_cache"),
    (4, "linear_num_value_heads linear_conv_kernel_dim mamba_d_conv conv_kernel"),
    (8, "mamba_n_heads mamba_num_heads mamba_dt_rank time_step_rank"),
    (16, "linear_key_head_dim linear_value_head_dim mamba_d_state mamba_d_head mamba_head_dim ssm_state_size"),
    (16, "state_size chunk_size mamba_chunk_size"),
    (128, "mamba_d_ssm"),
    # inputs of each layer
    (8, "hidden_size_per_layer_input laurel_rank"),
    (2, "altup_num_inputs"),
)
SIZES = {name: size for size, names in _SIZES for name in names.split()}
"""What a config has of these, and is not None by default, gets this value."""

_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_CONVOLUTIONS = ["conv", "full_attention"] * 2
_LATE_WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
}
_TINY_BYTES = {"hidden_size_global": 64, "num_hidden_layers": 2}
_GRANITE = {"attention_multiplier": 0.2, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
_DOTS3 = {
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
_QWEN4 = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 64,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [1, 3]},
    "BltForCausalLM": {"encoder_hash_byte_group_vocab": 512, "local_attention_window_len": WINDOW},
    "BltForCausalLM/encoder_config": _TINY_BYTES,
    "BltForCausalLM/decoder_config": _TINY_BYTES,
    "CohereForCausalLM": {"logit_scale": 0.8},
    "Cohere2ForCausalLM": {"logit_scale": 0.8},
    "Cohere2MoeForCausalLM": {"logit_scale": 0.8},
    "CohereCompassForCausalLM": {
        "layer_types": _ALTERNATING,
        "rope_parameters": {key: {"rope_type": "default", "rope_theta": 1e4} for key in _ALTERNATING},
    },
    "DbrxForCausalLM/attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
    "DbrxForCausalLM/ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_top_k": 2},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "DoryForCausalLM": {"ngpt_alpha_init": 0.5, "n_input_layers": 1, "n_output_layers": 1},
    "Dots1ForCausalLM": {
        "layer_types": _ALTERNATING,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "Dots3NoteForCausalLM": _DOTS3,
    "Dots3NoteForCausalLM:dots3_note/text_config": _DOTS3,
    "Dots3NoteForCausalLM:dots3_note/vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "Dots3NoteForCausalLM:dots3_note/audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]]},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 1, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]},
    "GraniteForCausalLM": _GRANITE,
    "GraniteSWAForCausalLM": _GRANITE,
    "GraniteMoeForCausalLM": _GRANITE,
    "GraniteMoeSWAForCausalLM": _GRANITE,
    "GraniteMoeSharedForCausalLM": _GRANITE,
    "GraniteMoeHybridForCausalLM": {**_GRANITE, "layer_types": ["linear_attention", "full_attention"] * 2},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 16},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 16},
    "Inkling2ForCausalLM": {"unpadded_vocab_size": VOCABULARY},
    "Inkling2LoopForCausalLM": {"unpadded_vocab_size": VOCABULARY},
    "InklingForCausalLM": {"logits_mup_width_multiplier": 1.25},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "LagunaForCausalLM": {"layer_types": _ALTERNATING},
    "Lfm2ForCausalLM": {"layer_types": _CONVOLUTIONS},
    "Lfm2MoeForCausalLM": {"layer_types": _CONVOLUTIONS},
    "Llama4ForCausalLM": {"num_experts_per_tok": 1},
    "Llama4ForCausalLM:llama4/text_config": {"num_experts_per_tok": 1},
    "LongcatFlashForCausalLM": {"head_dim": 8, "zero_expert_num": 2},
    "Mamba2ForCausalLM": {"num_heads": 8},
    "MellumForCausalLM": {"layer_types": _ALTERNATING},
    "MiniCPM3ForCausalLM": {"dim_model_base": 48},
    "MinistralForCausalLM": {"head_dim": 16},
    "Mistral4ForCausalLM": {"qk_nope_head_dim": 24},
    "MusicgenForCausalLM:musicgen/decoder": {"num_codebooks": 1},
    "MusicgenMelodyForCausalLM:musicgen_melody/decoder": {"num_codebooks": 1},
    "NemotronForCausalLM": {"head_dim": 16, "num_key_value_heads": 2},
    "NemotronHForCausalLM": {"layers_block_type": ["mamba", "attention", "moe", "mlp"]},
    "Phi4MultimodalForCausalLM/audio_config": {
        "num_blocks": 2,
        "nemo_conv_channels": 64,
        "ext_pw_out_channel": 64,
        "depthwise_separable_out_channel": 64,
    },
    "Qwen2ForCausalLM": _LATE_WINDOWS,
    "Qwen2MoeForCausalLM": _LATE_WINDOWS,
    "Qwen3ForCausalLM": _LATE_WINDOWS,
    "Qwen4ExpForCausalLM": _QWEN4,
    "Qwen4ExpForCausalLM:qwen4_exp/text_config": _QWEN4,
    "ReformerModelWithLMHead": {"axial_pos_shape": [16, 32], "axial_pos_embds_dim": [16, 48]},
    "RoCBertForCausalLM": {"shape_vocab_size": 64, "pronunciation_vocab_size": 64},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "XLMWithLMHeadModel": {"causal": True},
    "ZambaForCausalLM": {"layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"]},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
"""What an architecture, or a part of its config, needs besides."""

NO_GENERATORS = {
    "Gemma4AssistantForCausalLM": "it drafts, on the K/V of another model",
    "Gemma4UnifiedAssistantForCausalLM": "it drafts, on the K/V of another model",
}
"""Classes of which no checkpoint generates text by itself."""
