"""The config.json of a model, from the metadata and the tensors of a GGUF file.

Keys: https://github.com/ggml-org/llama.cpp, src/llama-arch.cpp and conversion/.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from nanoengine.errors import InvalidWeights, UnsupportedModel, shown
from nanoengine.models.config_fields import MAX_LAYERS
from nanoengine.models.gguf.architectures import (
    ARCHITECTURES,
    COMMON_KEYS,
    GRANITE_KEYS,
    GROWTH,
    MIXED,
    VARIANTS,
    WINDOW,
    Architecture,
)
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.gguf.gemma4 import gemma4_layers, gemma4_ropes
from nanoengine.models.gguf.hybrids import OF_STATES, complete_hybrid
from nanoengine.models.gguf.keys import Keys
from nanoengine.models.gguf.rope import EPSILON, rope_parameters
from nanoengine.models.gguf.routers import NORMALIZED, complete_router, num_experts
from nanoengine.models.gguf.tensor_names import EMBEDDING, GEMMA, GEMMA4, HEAD, HYBRIDS, NEMOTRON_H
from nanoengine.models.gguf.values import get

ZERO_IS_NONE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")

PATTERNED = ("Gemma3ForCausalLM", "Olmo3ForCausalLM", "GptOssForCausalLM", "Exaone4ForCausalLM")
"""Architectures whose layers have windows by a pattern, for which there is a default."""

EXAONE_32B_LAYERS = 64
"""Layers of the only EXAONE 4 with windows, by which llama.cpp recognizes it."""

WINDOWS = "attention.sliding_window_pattern"
GEMMA_27B_LAYERS = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}
"""Layers of the models with scores scaled by hidden_size / heads, by which llama.cpp recognizes them."""

WITHOUT_FLOAT16 = HYBRIDS | GEMMA | {GEMMA4, "GptOssForCausalLM"}
"""Architectures whose hidden states exceed 65,504, the largest number of float16, or whose kernels lack float16."""

BIASES = {
    "attention_bias": (".attn_q.bias", ".attn_k.bias", ".attn_v.bias", ".attn_output.bias"),
    "attention_out_bias": (".attn_output.bias",),
    "use_bias": (".attn_output.bias",),
    "mlp_bias": (".ffn_gate.bias", ".ffn_up.bias", ".ffn_down.bias"),
}
"""Switches of a config -> endings of tensors with which they are on."""

SWITCHES = {
    **dict.fromkeys(("LlamaForCausalLM", "GraniteForCausalLM", "SmolLM3ForCausalLM"), ("attention_bias", "mlp_bias")),
    **dict.fromkeys(("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Olmo2ForCausalLM"), ("attention_bias",)),
    **dict.fromkeys(("Olmo3ForCausalLM", "Glm4ForCausalLM", "HunYuanDenseV1ForCausalLM"), ("attention_bias",)),
    **dict.fromkeys(("Glm4MoeForCausalLM", "Dots1ForCausalLM"), ("attention_bias",)),
    "SeedOssForCausalLM": ("attention_bias", "attention_out_bias", "mlp_bias"),
    "Ernie4_5ForCausalLM": ("use_bias",),
}
"""Architecture -> switches in its config; other architectures have none."""


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The model's config.json, in Hugging Face's form.

    Hugging Face lacks one type of `rope_parameters`: "factors", with a divisor for each frequency in `factors`.

    Raises:
        UnsupportedModel: another architecture; a key that is missing, not known, or has a value that is not supported.
        InvalidWeights: a tensor with facts of the config is missing or misshapen.
    """
    kind = file.metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise UnsupportedModel(f"{file.path} has general.type {shown(kind)}; only a model can be run")
    keys = Keys(file, [name for name in ARCHITECTURES if " " not in name])
    more = VARIANTS.get(keys.architecture)
    is_variant = more is not None and keys.number(more, default=0) > 0
    ours = ARCHITECTURES[f"{keys.architecture} with {more}" if is_variant else keys.architecture]
    config: dict[str, Any] = {
        "architectures": [ours.name],
        "model_type": ours.model_type,
        "dtype": _dtype(file, ours.name),
    }
    unsaid: dict[str, float] = {"feed_forward_length": 1} if ours.fixed is MIXED else {}  # no layer is without experts
    if ours.name == "Gemma3ForCausalLM":  # Ollama's files of those that see pictures
        unsaid = {EPSILON: 1e-6}
    has_gaps = {"some_have_none": ours.name == NEMOTRON_H}
    several = ("feed_forward_length",) if ours.name == GEMMA4 else ()  # which `gemma4_layers` reads
    config |= {**ours.fixed} | {
        name: keys.number(key, unsaid.get(key), **has_gaps) for key, name in COMMON_KEYS.items() if key not in several
    }
    if (layers := config["num_hidden_layers"]) > MAX_LAYERS:
        raise keys.unsupported("block_count", layers, f"at most {MAX_LAYERS} layers")
    stated = (key for key in ours.keys if key in keys or key.startswith(OF_STATES))
    config |= {ours.keys[key]: keys.number(key) for key in stated}
    config |= gemma4_layers(keys, config, file.tensors) if ours.name == GEMMA4 else _heads(keys, config, ours)
    if ours.name in HYBRIDS:
        complete_hybrid(keys, config, file.tensors)
    config |= {name: config[name] or None for name in ZERO_IS_NONE if name in config}
    if ours.name in NORMALIZED:
        complete_router(keys, config, file)
    if ours.keys.items() >= GRANITE_KEYS.items():
        _complete_granite(keys, config)
    if (layers_of_27b := GEMMA_27B_LAYERS.get(ours.name)) is not None:
        is_27b = config["num_hidden_layers"] == layers_of_27b
        shared = config["hidden_size"] // max(1, config["num_attention_heads"])  # none are refused with all other sizes
        config["query_pre_attn_scalar"] = shared if is_27b else config["head_dim"]
    if ours.name in PATTERNED:
        has_none = ours.name == "Exaone4ForCausalLM" and config["num_hidden_layers"] != EXAONE_32B_LAYERS
        if not has_none and not keys.number(WINDOW):
            raise keys.unsupported(WINDOW, 0, "a number of tokens")
        config |= _layer_types(keys, config["num_hidden_layers"])
    if ours.name == "Llama4ForCausalLM":  # as llama.cpp knows Maverick from Scout; Ollama says it
        config["use_qk_norm"] = keys.flag("use_qk_norm", default=config.get("num_local_experts") != 128)
    ropes = gemma4_ropes if ours.name == GEMMA4 else rope_parameters
    config["rope_parameters"] = rope = ropes(file, keys, config)
    if ours.name == "Ministral3ForCausalLM":
        period = keys.number("rope.scaling.original_context_length", default=config["max_position_embeddings"])
        keys.expect("attention.temperature_length", period, f"the original_context_length, {period}")
        rope |= {"llama_4_scaling_beta": keys.number(GROWTH), "original_max_position_embeddings": period}
    if ours.name == "Phi3ForCausalLM":  # which reads it there alone
        config["original_max_position_embeddings"] = rope.get("original_max_position_embeddings", 4096)
    keys.check_rest()
    _check_experts(file, num_experts(config))
    config["eos_token_id"] = get(file.metadata, "tokenizer.ggml.eos_token_id", int, None)
    return config | _from_tensors(file, ours.name)


def _layer_types(keys: Keys, layers: int) -> dict[str, list[str]]:
    """The kinds of layers; a file says of each layer whether it has a window, or that every n-th has none."""
    if WINDOWS not in keys:
        return {}
    if keys.is_list(WINDOWS):
        slides = keys.each(WINDOWS, layers)
    else:
        period = keys.number(WINDOWS)
        slides = [(i + 1) % (period or layers + 1) for i in range(layers)]
    return {"layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides]}


def _dtype(file: GGUFFile, architecture: str) -> str:
    """The dtype of most numbers; bfloat16 if they are quantized (its range is that of the formats), or without float16."""
    counts: Counter[str] = Counter()
    for record in file.tensors.values():
        counts[record.type] += math.prod(record.shape)
    most = max(counts, key=counts.__getitem__, default="BF16")
    halves = "bfloat16" if architecture in WITHOUT_FLOAT16 else "float16"
    return {"F32": "float32", "F16": halves}.get(most, "bfloat16")


def _heads(keys: Keys, config: Mapping[str, Any], ours: Architecture) -> dict[str, int]:
    heads = config["num_attention_heads"]
    size = keys.number("attention.key_length", default=config["hidden_size"] // max(heads, 1))
    if size < 1:
        raise keys.unsupported("attention.head_count", heads, "1 to embedding_length")
    keys.expect("attention.value_length", size, f"the key_length, {size}")
    is_hybrid = ours.name in HYBRIDS
    shared = keys.number("attention.head_count_kv", default=heads, some_have_none=is_hybrid)
    return {"num_key_value_heads": shared, "head_dim": size}


def _complete_granite(keys: Keys, config: dict[str, Any]) -> None:
    """Add the fields whose defaults differ between llama.cpp and Hugging Face."""
    if (name := config["architectures"][0]) not in HYBRIDS:
        if not keys.flag("rope.scaling.finetuned", default=True):
            raise keys.unsupported("rope.scaling.finetuned", False, "true: heads that are rotated")
        keys.ignore("ssm.")  # files of Granite 4 with attention alone say what the others' states are
    if name == "GraniteForCausalLM":
        keys.ignore("expert_shared_feed_forward_length")  # and the width of the MLP twice
    if not config.get("attention_multiplier"):
        config["attention_multiplier"] = config["head_dim"] ** -0.5


def _check_experts(file: GGUFFile, experts: int) -> None:
    for name, record in file.tensors.items():
        if name.endswith("_exps.weight") and record.shape[0] != experts:
            raise InvalidWeights(
                f"{file.path} has {name} of {record.shape[0]} experts, but an expert_count of {experts}"
            )


def _from_tensors(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """The fields that follow from the list of tensors."""
    if EMBEDDING not in file.tensors:
        raise InvalidWeights(f"{file.path} has no {EMBEDDING}: it is no complete model")
    first = [name for name in file.tensors if name.startswith("blk.0.")]
    switches = {
        switch: any(name.endswith(BIASES[switch]) for name in first) for switch in SWITCHES.get(architecture, ())
    }
    sizes = {"vocab_size": file.tensors[EMBEDDING].shape[0], "tie_word_embeddings": HEAD not in file.tensors}
    return sizes | switches
