"""Llama 4 (Meta, 2025), text: chunked attention in the layers with rotation, queries scaled by position in the others; one expert
for each token, whose input a sigmoid multiplies, beside an MLP of all tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanoengine.models.config_fields import MAX_LAYERS, ConfigFields
from nanoengine.models.families.common import biases_of, head_dim_of, read_decoder, rotated_layers
from nanoengine.models.families.routed import local_experts
from nanoengine.models.families.windows import layer_types_of
from nanoengine.models.model_config import ExpertsConfig, LayerConfig, ModelConfig, TensorNames
from nanoengine.models.rope_config import read_rope

ARCHITECTURES = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
FULL, CHUNKED = "full_attention", "chunked_attention"
NAMES = TensorNames(
    router="router", expert_gate_up_down=("gate_up_proj", "down_proj"), replaced=((".mlp.", ".feed_forward."),)
)


def read_config(fields: ConfigFields, _architecture: str) -> ModelConfig:
    fields.ignore("for_llm_compressor")
    count = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    is_split = fields.flag("linears_are_split")  # GGUF files
    rotates, experts = rotated_layers(fields, count), _experts(fields, is_split)
    size = fields.nullable("attention_chunk_size", 8192, fields.integer)
    types = layer_types_of(fields, (FULL, CHUNKED)) or [CHUNKED if rotates[i] and size else FULL for i in range(count)]
    if size is None and CHUNKED in types:
        raise fields.wrong("attention_chunk_size", None, f"layer_types has {CHUNKED}, so it must be a number of tokens")
    rope = replace(read_rope(fields, head_dim_of(fields, 128), 500_000.0), interleaved=True)
    is_normed = fields.flag("use_qk_norm", True)
    if is_normed and rope.amplitude != 1.0:  # a norm after the rotation undoes the amplitude
        why = f"rotations that make heads {rope.amplitude} times as long are not supported"
        raise fields.wrong("use_qk_norm", True, why)
    step = fields.integer("interleave_moe_layer_step", 1)
    sparse = fields.layers("moe_layers", range(step - 1, count, step))
    windows = [size if kind == CHUNKED else None for kind in types]
    layers = tuple(
        LayerConfig(rope=rope if rotates[i] else None, window=windows[i], has_experts=i in sparse) for i in range(count)
    )
    return read_decoder(
        fields,
        head_dim=128,
        eps=1e-5,
        layers=layers,
        experts=experts,
        names=TensorNames() if is_split else NAMES,
        has_chunks=True,
        qk_norm="plain" if is_normed else None,
        **_growth(fields),
        intermediate_size=fields.integer("intermediate_size_mlp", 16384),
        **biases_of(fields),
    )


def _experts(fields: ConfigFields, is_split: bool) -> ExpertsConfig:
    fields.expect("num_experts_per_tok", 1)
    width = fields.integer("intermediate_size")
    experts = local_experts(fields, 16, 1, normalize=False, scales_inputs=True, shared_size=width)
    return replace(experts, are_stacked=not is_split, are_transposed=not is_split)


def _growth(fields: ConfigFields) -> dict[str, Any]:
    """The scale of queries by position; in old files `attn_temperature_tuning` is a number."""
    period, growth = fields.integer("floor_scale", 8192), fields.number("attn_scale", 0.1)
    return {"query_growth": growth, "query_period": period} if fields.get("attn_temperature_tuning", True) else {}
