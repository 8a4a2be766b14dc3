"""Qwen 2 and 2.5 (Qwen team, 2024): Llama with biases of q, k and v; Qwen 3 (2025): with norms over each head of q and k in their
place; and its mixture of experts.
"""

from __future__ import annotations

from nanoengine.models.config_fields import MAX_LAYERS, ConfigFields
from nanoengine.models.families.common import biases_of, head_dim_of, read_decoder
from nanoengine.models.families.windows import window_of, windows_of_qwen
from nanoengine.models.model_config import ExpertsConfig, LayerConfig, ModelConfig
from nanoengine.models.rope_config import read_rope

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    if architecture == "Qwen2ForCausalLM":
        return read_decoder(fields, architecture, qkv_bias=True, windows=windows_of_qwen(fields))
    facts = biases_of(fields) | {"qk_norm": "head"}
    if architecture == "Qwen3ForCausalLM":
        return read_decoder(fields, architecture, head_dim=128, windows=windows_of_qwen(fields), **facts)
    window = window_of(fields, 4096) if fields.flag("use_sliding_window") else None
    count = fields.integer("num_experts", fields.get("num_local_experts"))  # the second is what transformers 5 writes
    experts = ExpertsConfig(
        num_experts=count,
        num_chosen=fields.integer("num_experts_per_tok", most=count),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalize=fields.flag("norm_topk_prob"),
    )
    rope = read_rope(fields, head_dim_of(fields))
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.wrong("mlp_only_layers", dense, "it must be a list of layers")
    without = set(dense)
    layers = tuple(
        LayerConfig(rope=rope, window=window, has_experts=i not in without and (i + 1) % step == 0)
        for i in range(fields.integer("num_hidden_layers", most=MAX_LAYERS))
    )
    return read_decoder(fields, architecture, layers=layers, experts=experts, **facts)
