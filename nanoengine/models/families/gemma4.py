"""Gemma 4, text (Google DeepMind, 2026): the norms of Gemma 3, without the offset. Layers with full attention have wider heads,
fewer KV heads, and may use K as V; the last layers may read the K/V of earlier layers; embeddings for each layer; experts beside
the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import head_dim_of, read_decoder
from nanoengine.models.families.gemma import NAMES, common_facts
from nanoengine.models.families.routed import local_experts
from nanoengine.models.families.windows import FULL, SLIDING, types_by_pattern, window_of
from nanoengine.models.model_config import LayerConfig, ModelConfig
from nanoengine.models.rope_config import read_ropes

UNIFIED = ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration")
ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", *UNIFIED)
HEAD_DIM, FULL_HEAD_DIM, PERIOD = 256, 512, 6
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
EXPERT_KEYS = ("num_experts", "top_k_experts", "moe_intermediate_size")
STACKED, SPLIT = ("gate_up_proj", "down_proj"), NAMES.expert_gate_up_down
OF_LAYERS = {"num_key_value_heads": "num_global_key_value_heads", "head_dim": "global_head_dim"}
"""Keys of per_layer_config for layers with full attention, and the older fields of the same values."""


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    fields.expect("use_bidirectional_attention", "vision")  # only tokens of images attend to later tokens
    # Fields of audio and vision, and an old name of moe_intermediate_size.
    fields.ignore("audio_config", "eoa_token_index", "vision_soft_tokens_per_image", "expert_intermediate_size")
    types = [*types_by_pattern(fields, PERIOD)[:-1], FULL]
    k_is_v = fields.flag("attention_k_eq_v")
    is_stated = _read_layers(fields, types)
    kv_heads = fields.integer("num_key_value_heads", 4)
    sizes = {SLIDING: head_dim_of(fields, HEAD_DIM), FULL: head_dim_of(fields, FULL_HEAD_DIM, "global_head_dim")}
    of_full = fields.integer("num_global_key_value_heads", kv_heads)
    counts = {SLIDING: kv_heads, FULL: of_full if k_is_v or is_stated else kv_heads}
    fields.default(rope_parameters=ROPES)
    ropes = read_ropes(fields, sizes[SLIDING], 1e6, local_theta=1e4, full_head_dim=sizes[FULL])
    window = window_of(fields, 1024 if architecture in UNIFIED else 512)
    are_split = fields.flag("experts_are_split")  # GGUF files
    if window is None:
        raise fields.wrong("sliding_window", None, "it must be a number of tokens")
    experts = None
    if fields.flag("enable_moe_block"):
        experts = local_experts(fields, keys=EXPERT_KEYS, are_stacked=not are_split, beside_mlp=True)
    first_shared = len(types) - fields.integer("num_kv_shared_layers", 0, least=0)
    # The last layer with K/V of each kind.
    last = {kind: number for number, kind in enumerate(types[: max(first_shared, 0)])}
    is_wide, width = fields.flag("use_double_wide_mlp"), fields.integer("intermediate_size")

    def layer(number: int, kind: str) -> LayerConfig:
        if number >= first_shared and kind not in last:
            why = f"layer {number} ({kind}) must have one of its kind before the layers without K/V"
            raise fields.wrong("num_kv_shared_layers", len(types) - first_shared, why)
        return LayerConfig(
            rope=ropes[kind],
            window=window if kind == SLIDING else None,
            has_experts=experts is not None,
            head_dim=sizes[kind],
            num_kv_heads=counts[kind],
            intermediate_size=2 * width if is_wide and number >= first_shared else width,
            v_is_k=k_is_v and kind == FULL,
            kv_layer=last[kind] if number >= first_shared else None,
        )

    config = read_decoder(
        fields,
        head_dim=HEAD_DIM,
        layers=tuple(layer(number, kind) for number, kind in enumerate(types)),
        qk_norm="head",
        has_v_norm=True,
        has_layer_scale=True,
        per_layer_size=_read_per_layer_size(fields, architecture),
        attention_scale=1.0,
        names=replace(NAMES, router="router.proj", expert_gate_up_down=SPLIT if are_split else STACKED),
        experts=experts,
        **common_facts(fields),
    )
    if config.num_heads % of_full:
        why = f"it must divide num_attention_heads, {config.num_heads}"
        raise fields.wrong("num_global_key_value_heads", of_full, why)
    # The cache is sized for the largest K/V of a token; of equal sizes for more heads, which may have more scales.
    largest = max(types, key=lambda kind: (sizes[kind] * counts[kind], counts[kind]))
    return replace(config, head_dim=sizes[largest], num_kv_heads=counts[largest])


def _read_layers(fields: ConfigFields, types: list[str]) -> bool:
    """Convert the per_layer_config of newer files to the older fields; return whether the file has it."""
    table = fields.table_of("per_layer_config")
    if fields.get("per_layer_config") is None:
        return False
    one: Any = next(iter(table.values()), {})
    full = [number for number, kind in enumerate(types) if kind == FULL]
    numbers = sorted(int(name) if name.isdecimal() else -1 for name in table)  # names may have leading zeros
    is_known = isinstance(one, Mapping) and set(one) <= set(OF_LAYERS)
    if table and (numbers != full or any(other != one for other in table.values()) or not is_known):
        why = f"it must have equal tables of {' and '.join(OF_LAYERS)} for the layers {', '.join(map(str, full))}"
        raise fields.wrong("per_layer_config", dict(table), why)
    fields.default(**{of_full: one.get(name, fields.get(name)) for name, of_full in OF_LAYERS.items()})
    return True


def _read_per_layer_size(fields: ConfigFields, architecture: str) -> int:
    fields.ignore("vocab_size_per_layer_input")  # files without a table have it, too
    if architecture in UNIFIED or fields.get("hidden_size_per_layer_input", 256) == 0:
        return 0
    rows, size = fields.integer("vocab_size_per_layer_input", 262_144), fields.integer("vocab_size")
    if rows != size:
        raise fields.wrong("vocab_size_per_layer_input", rows, f"it must be vocab_size, {size}")
    return fields.integer("hidden_size_per_layer_input", 256)
