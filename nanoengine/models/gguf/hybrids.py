"""Fields of a config.json for layers with recurrent states, from the metadata of a GGUF file.

Hugging Face lacks some fields: "qkvz_is_packed" and "ba_is_packed" name projections in the order of Qwen3-Next,
"linears_are_split" says that projections of Granite have a tensor each, and "value_heads_are_tiled" that heads of Qwen3.5 are in
another order. Weights stay in the order of the file: `ssm_out` is quantized along heads, in blocks that may be wider than a head.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from nanoengine.models.gguf.keys import Keys
from nanoengine.models.gguf.tensor_names import DELTA_NETS, FALCON_H1, LFM2, NEMOTRON_H, PACKED_BA, PACKED_QKVZ

KV_HEADS = "attention.head_count_kv"
OF_STATES = ("ssm.", "shortconv.")
"""Prefixes of keys that a file of these architectures must have."""


def complete_hybrid(keys: Keys, config: dict[str, Any], tensors: Collection[str]) -> None:
    """Add the kinds of layers, and sizes that are quotients of others.

    Raises:
        UnsupportedModel: sizes that contradict each other.
    """
    name, layers = config["architectures"][0], config["num_hidden_layers"]
    have_states: list[int] | None = None

    def some(ending: str) -> bool:
        return any(tensor.endswith(f".{ending}") for tensor in tensors)

    if name in DELTA_NETS:
        if "attention.recurrent_layers" in keys:
            have_states = keys.each("attention.recurrent_layers", layers)
        elif keys.is_list(KV_HEADS) and 0 in (counts := keys.each(KV_HEADS, layers)):
            have_states = [count == 0 for count in counts]
        config["num_hidden_layers"] = layers - keys.number("nextn_predict_layers", default=0)
        config["linear_value_head_dim"] = _quotient(keys, "ssm.inner_size", config["linear_num_value_heads"])
        for field, tensor in (("qkvz_is_packed", PACKED_QKVZ), ("ba_is_packed", PACKED_BA)):
            config[field] = some(tensor)
        config["value_heads_are_tiled"] = keys.flag("ssm.v_head_reordered", default=name != "Qwen3NextForCausalLM")
    elif name == FALCON_H1:  # its factors are in the weights
        config |= {"mamba_rms_norm": some("ssm_norm.weight"), "mamba_norm_before_gate": False}
        config["mamba_conv_bias"] = some("ssm_conv1d.bias")
    elif name == NEMOTRON_H:
        widths = keys.each("feed_forward_length", layers)
        kinds = zip(keys.each(KV_HEADS, layers), widths, strict=True)
        letters = ["-" if width else "*" if heads else "M" for heads, width in kinds]
        sparse = [f"blk.{number}.ffn_gate_inp.weight" in tensors for number in range(layers)]
        letters = ["E" if is_sparse else letter for is_sparse, letter in zip(sparse, letters, strict=True)]
        config["hybrid_override_pattern"] = "".join(letters)
        config |= {"use_conv_bias": some("ssm_conv1d.bias"), "mlp_bias": some("ffn_up.bias")}
        config["mamba_head_dim"] = _quotient(keys, "ssm.inner_size", config["mamba_num_heads"])
        config["layer_norm_epsilon"] = config["rms_norm_eps"]
    else:
        have_states = [count == 0 for count in keys.each(KV_HEADS, layers)]
    if name == "GraniteMoeHybridForCausalLM":
        config["mamba_expand"] = _quotient(keys, "ssm.inner_size", config["hidden_size"])
        config["mamba_conv_bias"] = some("ssm_conv1d.bias")
        config["position_embedding_type"] = "rope" if keys.flag("rope.scaling.finetuned", default=True) else "nope"
        config.setdefault("num_local_experts", 0)
        config.setdefault("shared_intermediate_size", config["intermediate_size"])
    if have_states is not None:
        names = "full_attention", "conv" if name in LFM2 else "linear_attention"
        config["layer_types"] = [names[bool(is_so)] for is_so in have_states[: config["num_hidden_layers"]]]


def _quotient(keys: Keys, key: str, divisor: int) -> int:
    value = keys.number(key)
    if not divisor or value % divisor:
        raise keys.unsupported(key, value, f"a multiple of {divisor}")
    return value // divisor
