"""Llama 4 (Meta, 2025), text: chunked attention in the layers with rotation, queries scaled by position in the others; one expert
for each token, whose input a sigmoid multiplies, beside an MLP of all tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanoengine.models.config_fields import MAX_LAYERS, ConfigFields
from nanoengine.models.families.common import biases_of, head_dim_of, read_decoder, rotated_layers
from nanoengine.models.families.windows import layer_types_of
from nanoengine.models.model_config import ExpertsConfig, LayerConfig, ModelConfig, TensorNames
from nanoengine.models.rope_config import read_rope

ARCHITECTURES = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
FULL, CHUNKED = "full_attention", "chunked_attention"
NAMES = TensorNames(
    router="router", expert_gate_up_down=("gate_up_proj", "down_proj"), replaced=((".mlp.", ".feed_forward."),)
)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    fields.ignore("for_llm_compressor")
    count = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    is_split = fields.flag("linears_are_split")  # GGUF files
    rotates, experts = rotated_layers(fields, count), _experts(fields, is_split)
    has_chunks = "attention_chunk_size" not in fields or fields.get("attention_chunk_size") is not None
    size = fields.integer("attention_chunk_size", 8192) if has_chunks else None
    types = layer_types_of(fields, (FULL, CHUNKED)) or [CHUNKED if rotates[i] and size else FULL for i in range(count)]
    if size is None and CHUNKED in types:
        raise fields.wrong("attention_chunk_size", None, f"layer_types has {CHUNKED}, so it must be a number of tokens")
    rope = replace(read_rope(fields, head_dim_of(fields, 128), 500_000.0), interleaved=True)
    is_normed = fields.flag("use_qk_norm", True)
    if is_normed and rope.amplitude != 1.0:  # a norm after the rotation undoes the amplitude
        raise fields.wrong(
            "use_qk_norm", True, f"rotations that make heads {rope.amplitude} times as long are not supported"
        )
    sparse = _sparse_layers(fields, count)
    layers = tuple(
        LayerConfig(
            rope=rope if rotates[i] else None, window=size if types[i] == CHUNKED else None, has_experts=i in sparse
        )
        for i in range(count)
    )
    return read_decoder(
        fields,
        architecture,
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
    return ExpertsConfig(
        num_experts=fields.integer("num_local_experts", 16),
        num_chosen=1,
        intermediate_size=width,
        normalize=False,
        are_stacked=not is_split,
        are_transposed=not is_split,
        scales_inputs=True,
        shared_size=width,
    )


def _sparse_layers(fields: ConfigFields, count: int) -> set[int]:
    """Numbers of the layers with experts: `moe_layers`, or every n-th layer."""
    step = fields.integer("interleave_moe_layer_step", 1)
    return fields.layers("moe_layers", range(step - 1, count, step))


def _growth(fields: ConfigFields) -> dict[str, Any]:
    """The scale of queries by position; in old files `attn_temperature_tuning` is a number."""
    period, growth = fields.integer("floor_scale", 8192), fields.number("attn_scale", 0.1)
    return {"query_growth": growth, "query_period": period} if fields.get("attn_temperature_tuning", True) else {}
