"""Fields of a config.json for Gemma 4, whose layers differ, from the metadata of a GGUF file.

Hugging Face lacks one field: "experts_are_split" says that gate and up of an expert have a tensor each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from nanoengine.errors import InvalidWeights
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.gguf.keys import Keys
from nanoengine.models.gguf.rope import divisors, partial_factor
from nanoengine.models.gguf.tensor_names import EMBEDDING, ROPE_FACTORS

KINDS = "full_attention", "sliding_attention"
STILL = float(np.float32(1e30))
"""The divisor of the frequency of a pair that is not rotated."""


def gemma4_layers(keys: Keys, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Sizes of layers with a window and without.

    Raises:
        UnsupportedModel: layers that differ in more than their windows and the reuse of K and V of other layers.
    """
    count = config["num_hidden_layers"]
    slides = [bool(value) for value in keys.each("attention.sliding_window_pattern", count)]
    first_shared = count - config.get("num_kv_shared_layers", 0)
    fields = {"layer_types": [KINDS[has_window] for has_window in slides], "experts_are_split": True}
    fields |= {"enable_moe_block": config.get("num_experts", 0) > 0, "num_kv_shared_layers": count - first_shared}
    fields["hidden_size_per_layer_input"] = config.get("hidden_size_per_layer_input", 0)
    for suffix, field in (("", "global_head_dim"), ("_swa", "head_dim")):
        fields[field] = size = keys.number(f"attention.key_length{suffix}")
        keys.expect(f"attention.value_length{suffix}", size, f"the key_length{suffix}, {size}")
    heads = keys.each("attention.head_count_kv", count)
    of_kind = {kind: [n for n, slide in zip(heads, slides, strict=True) if slide is kind] for kind in (False, True)}
    if any(len(set(counts)) > 1 for counts in of_kind.values()):
        raise keys.unsupported("attention.head_count_kv", heads, "one count for layers with a window, one for others")
    fields["num_key_value_heads"] = of_kind[True][0] if of_kind[True] else heads[0]
    fields["num_global_key_value_heads"] = of_kind[False][0] if of_kind[False] else heads[0]
    have_v = [f"blk.{i}.attn_v.weight" in tensors for i in range(max(first_shared, 0)) if not slides[i]]
    fields["attention_k_eq_v"] = k_is_v = bool(have_v) and not any(have_v)
    if not k_is_v and len(set(heads)) > 1:
        raise keys.unsupported(
            "attention.head_count_kv", heads, "one count, unless layers without a window lack attn_v"
        )
    widths = keys.each("feed_forward_length", count)
    fields["intermediate_size"] = width = widths[0]
    fields["use_double_wide_mlp"] = is_wide = widths[-1] == 2 * width
    if widths != [2 * width if is_wide and i >= first_shared else width for i in range(count)]:
        raise keys.unsupported("feed_forward_length", widths, "one, and perhaps twice as much where K and V are shared")
    return fields


def gemma4_ropes(file: GGUFFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Rotations of layers of each kind; layers without a window rotate the pairs whose divisor is 1.

    Raises:
        UnsupportedModel, InvalidWeights: rotations of parts of a head, or other divisors.
    """
    config["vocab_size_per_layer_input"] = file.tensors[EMBEDDING].shape[0] if EMBEDDING in file.tensors else 0
    ropes = {}
    for kind, suffix, field in zip(KINDS, ("", "_swa"), ("global_head_dim", "head_dim"), strict=True):
        size = config[field]
        keys.expect(f"rope.dimension_count{suffix}", size, f"the size of a head, {size}")
        theta = keys.number(f"rope.freq_base{suffix}", default=10_000.0 if suffix else 1_000_000.0)
        ropes[kind] = {"rope_type": "default", "rope_theta": float(theta)}
    if ROPE_FACTORS in file.tensors:
        stated = divisors(file, ROPE_FACTORS, config["global_head_dim"])
        turning = stated.count(1.0)
        if not turning or stated != [1.0] * turning + [STILL] * (len(stated) - turning):
            raise InvalidWeights(f"{file.path} has {ROPE_FACTORS} that is not of 1, and then of {STILL:g}")
        ratio = partial_factor(turning, len(stated))
        ropes[KINDS[0]] |= {"rope_type": "proportional", "partial_rotary_factor": ratio}
    return ropes
