"""What the metadata of a file says of a model, in the words of Hugging Face's config.json.

Keys: https://github.com/ggml-org/llama.cpp, src/llama-arch.cpp and conversion/.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from nanoengine.errors import InvalidWeights, UnsupportedModel, shown
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.gguf.gemma4 import GEMMA4_KEYS, gemma4_layers, gemma4_ropes
from nanoengine.models.gguf.hybrids import (
    DELTA_EXPERT_KEYS,
    DELTA_KEYS,
    LFM2_KEYS,
    MAMBA_KEYS,
    OF_STATES,
    complete_hybrid,
)
from nanoengine.models.gguf.keys import Keys
from nanoengine.models.gguf.tensor_names import EMBEDDING, GEMMA4, HEAD, MIXERS, ROPE_FACTORS, ROPE_LONG, ROPE_SHORT


class Architecture(NamedTuple):
    """What tells an architecture from the others."""

    name: str  # Hugging Face's
    model_type: str
    keys: Mapping[str, str] = {}  # its own, and what Hugging Face calls them
    fixed: Mapping[str, Any] = {}  # what its files do not say, because it is always so
    activation: Mapping[str, str] = {
        "hidden_act": "silu"
    }  # the field that names it at Hugging Face's, and its value there
    fits_float16: bool = True  # whether what it adds up over its layers stays below 65,504, where float16 ends


COMMON_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""What every file must say."""

MIXTURE_KEYS = {"expert_used_count": "num_experts_per_tok"}
GRANITE_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GEMMA_KEYS = {"attention.sliding_window": "sliding_window", "final_logit_softcapping": "final_logit_softcapping"}
GEMMA_ACTIVATION = {"hidden_activation": "gelu_pytorch_tanh"}
MIXED = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
MIXTRAL = "llama with experts"
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama"),
    MIXTRAL: Architecture("MixtralForCausalLM", "mixtral", MIXTURE_KEYS | {"expert_count": "num_local_experts"}),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        MIXTURE_KEYS | {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        MIXED,
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", {"attention.sliding_window": "sliding_window"}),
    "granite": Architecture("GraniteForCausalLM", "granite", GRANITE_KEYS),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2"),
    "gemma2": Architecture(
        *("Gemma2ForCausalLM", "gemma2", GEMMA_KEYS | {"attn_logit_softcapping": "attn_logit_softcapping"}),
        activation=GEMMA_ACTIVATION,
        fits_float16=False,
    ),
    "gemma3": Architecture(
        *(
            "Gemma3ForCausalLM",
            "gemma3_text",
            GEMMA_KEYS | {"attention.sliding_window_pattern": "sliding_window_pattern"},
        ),
        activation=GEMMA_ACTIVATION,
        fits_float16=False,
    ),
    "gemma4": Architecture(
        *("Gemma4ForCausalLM", "gemma4_text", GEMMA_KEYS | GEMMA4_KEYS),
        activation=GEMMA_ACTIVATION,
        fits_float16=False,
    ),
    # Kernels of layers with states know no float16.
    "lfm2": Architecture("Lfm2ForCausalLM", "lfm2", LFM2_KEYS, {"block_auto_adjust_ff_dim": False}, {}, False),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM", "qwen3_next", DELTA_KEYS | DELTA_EXPERT_KEYS, MIXED, fits_float16=False
    ),
    "qwen35": Architecture("Qwen3_5ForCausalLM", "qwen3_5_text", DELTA_KEYS, fits_float16=False),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", DELTA_KEYS | DELTA_EXPERT_KEYS, MIXED, fits_float16=False
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        GRANITE_KEYS | MAMBA_KEYS,
        {"linears_are_split": True},
        fits_float16=False,
    ),
}
"""Architectures by llama.cpp's names."""

ZERO_IS_NONE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")

GEMMA_27B_LAYERS = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}
"""How llama.cpp knows those whose scores are scaled by hidden_size / heads, and not by the size of a head."""

BIASES = {
    "attention_bias": (".attn_q.bias", ".attn_k.bias", ".attn_v.bias", ".attn_output.bias"),
    "mlp_bias": (".ffn_gate.bias", ".ffn_up.bias", ".ffn_down.bias"),
}
"""Switches of a config -> the tensors that say that they are on."""

SWITCHES = {
    "LlamaForCausalLM": ("attention_bias", "mlp_bias"),
    "GraniteForCausalLM": ("attention_bias", "mlp_bias"),
    "Qwen3ForCausalLM": ("attention_bias",),
    "Qwen3MoeForCausalLM": ("attention_bias",),
    "Olmo2ForCausalLM": ("attention_bias",),
}
"""Which of them a config has; of other architectures it is fixed."""


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The model's config.json, as Hugging Face would write it.

    One type of `rope_parameters` is not Hugging Face's: "factors", with a divisor for each frequency in `factors`.

    Raises:
        UnsupportedModel: another architecture; a key that is missing, not known, or has a value that is not supported.
        InvalidWeights: a tensor that says something of the model is missing or misshapen.
    """
    kind = file.metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise UnsupportedModel(f"{file.path} has general.type {shown(kind)}; only a model can be run")
    keys = Keys(file, [name for name in ARCHITECTURES if name != MIXTRAL])
    mixture = keys.architecture == "llama" and keys.number("expert_count", default=0) > 0
    ours = ARCHITECTURES[MIXTRAL if mixture else keys.architecture]
    config: dict[str, Any] = {
        "architectures": [ours.name],
        "model_type": ours.model_type,
        "dtype": _dtype(file, ours),
        **ours.activation,
    }
    several = ("feed_forward_length",) if ours.name == GEMMA4 else ()  # of which `gemma4_layers` reads the first
    unsaid = {"feed_forward_length": 1} if ours.fixed is MIXED else {}  # no layer is without experts
    config |= {**ours.fixed} | {
        name: keys.number(key, unsaid.get(key)) for key, name in COMMON_KEYS.items() if key not in several
    }
    stated = (key for key in ours.keys if key in keys or key.startswith(OF_STATES))
    config |= {ours.keys[key]: keys.number(key) for key in stated}
    config |= gemma4_layers(keys, config, file.tensors) if ours.name == GEMMA4 else _heads(keys, config, ours)
    if ours.name in MIXERS:
        complete_hybrid(keys, config, file.tensors)
    config |= {name: config[name] or None for name in ZERO_IS_NONE if name in config}
    if ours.keys.items() >= GRANITE_KEYS.items():
        _complete_granite(file, config)
    if (layers_of_27b := GEMMA_27B_LAYERS.get(ours.name)) is not None:
        is_27b = config["num_hidden_layers"] == layers_of_27b
        shared = config["hidden_size"] // max(1, config["num_attention_heads"])  # none are refused with all other sizes
        config["query_pre_attn_scalar"] = shared if is_27b else config["head_dim"]
    if ours.name == GEMMA4:
        config["rope_parameters"] = rope = gemma4_ropes(file, keys, config)
    else:
        config["rope_parameters"] = rope = _rope_parameters(file, keys, config)
    if ours.name == "Gemma3ForCausalLM":  # layers with a window have a base of their own, and are not scaled
        if not keys.number("attention.sliding_window"):
            raise keys.unsupported("attention.sliding_window", 0, "a number of tokens")
        local = {"rope_type": "default", "rope_theta": float(keys.number("rope.freq_base_swa", default=10000.0))}
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    if ours.name == "Phi3ForCausalLM":  # which reads it there alone
        config["original_max_position_embeddings"] = rope.get("original_max_position_embeddings", 4096)
    keys.check_rest()
    _check_experts(file, config.get("num_local_experts", config.get("num_experts", 0)))
    return config | _special_tokens(file) | _from_tensors(file, ours.name)


def _dtype(file: GGUFFile, architecture: Architecture) -> str:
    """What most numbers are, and bfloat16 if they are quantized (it holds more than the formats do), or float16 overflows."""
    counts: Counter[str] = Counter()
    for record in file.tensors.values():
        counts[record.type] += math.prod(record.shape)
    most = max(counts, key=counts.__getitem__, default="BF16")
    halves = "float16" if architecture.fits_float16 else "bfloat16"
    return {"F32": "float32", "F16": halves}.get(most, "bfloat16")


def _heads(keys: Keys, config: Mapping[str, Any], ours: Architecture) -> dict[str, int]:
    heads = config["num_attention_heads"]
    size = keys.number("attention.key_length", default=config["hidden_size"] // max(heads, 1))
    if size < 1:
        raise keys.unsupported("attention.head_count", heads, "1 to embedding_length")
    if (other := keys.number("attention.value_length", default=size)) != size:
        raise keys.unsupported("attention.value_length", other, f"the key_length, {size}")
    is_hybrid = ours.name in MIXERS
    shared = keys.number("attention.head_count_kv", default=heads, some_have_none=is_hybrid)
    return {"num_key_value_heads": shared, "head_dim": size}


def _complete_granite(file: GGUFFile, config: dict[str, Any]) -> None:
    """What llama.cpp and Hugging Face differ about, if it is left out."""
    if file.metadata.get("granite.rope.scaling.finetuned") is False:
        raise UnsupportedModel(
            f"{file.path} has granite.rope.scaling.finetuned False: it rotates nothing, not supported"
        )
    if not config.get("attention_multiplier"):
        config["attention_multiplier"] = config["head_dim"] ** -0.5


def _rope_parameters(file: GGUFFile, keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    size = config["head_dim"]
    rotated = keys.number("rope.dimension_count", default=size)
    if rotated > size or rotated % 2:
        raise keys.unsupported("rope.dimension_count", rotated, f"an even number up to the size of a head, {size}")
    rope: dict[str, Any] = {"rope_theta": float(keys.number("rope.freq_base", default=10000.0))}
    if rotated < size:
        ratio = rotated / size  # rounded, so that times the size it may be a trifle less than before
        rope["partial_rotary_factor"] = ratio if int(size * ratio) == rotated else math.nextafter(ratio, 1.0)
    kind = keys.text("rope.scaling.type", default="linear")
    factor = keys.number("rope.scaling.factor", default=keys.number("rope.scale_linear", default=0.0)) or 1.0
    original = keys.number("rope.scaling.original_context_length", default=config["max_position_embeddings"])
    attention = keys.number("rope.scaling.attn_factor", default=1.0)
    if {ROPE_LONG, ROPE_SHORT} <= file.tensors.keys() and ROPE_FACTORS not in file.tensors and factor == 1.0:
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        rope |= {
            "long_factor": _divisors(file, ROPE_LONG, rotated),
            "short_factor": _divisors(file, ROPE_SHORT, rotated),
        }
        return rope | ({"attention_factor": attention} if "rope.scaling.attn_factor" in keys else {})
    if attention != 1.0:
        raise keys.unsupported("rope.scaling.attn_factor", attention, "1.0 without long and short factors")
    if ROPE_FACTORS in file.tensors and (factor == 1.0 or kind == "none"):
        return rope | {"rope_type": "factors", "factors": _divisors(file, ROPE_FACTORS, rotated)}
    if any(name in file.tensors for name in (ROPE_FACTORS, ROPE_LONG, ROPE_SHORT)):
        raise keys.unsupported(
            "rope.scaling.factor", factor, "1.0 beside factors of each frequency, and of both lengths"
        )
    yarn = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
    own = {name: keys.number(f"rope.scaling.{key}") for name, key in yarn.items() if f"rope.scaling.{key}" in keys}
    if kind not in ("none", "linear", "yarn"):
        raise keys.unsupported("rope.scaling.type", kind, "none, linear, yarn, or longrope with its factors")
    if factor == 1.0 or kind == "none":
        return rope | {"rope_type": "default"}
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    return rope | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | own


def _divisors(file: GGUFFile, name: str, rotated: int) -> list[float]:
    record = file.tensors[name]
    if (record.type, record.shape) != ("F32", (rotated // 2,)):
        raise InvalidWeights(f"{file.path} has {name} as {record.type} {list(record.shape)}, not F32 [{rotated // 2}]")
    divisors = file.data(name).view("<f4")
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise InvalidWeights(f"{file.path} has {name} with numbers that divide no frequency: fetch it again")
    return divisors.tolist()


def _check_experts(file: GGUFFile, experts: int) -> None:
    for name, record in file.tensors.items():
        if name.endswith("_exps.weight") and record.shape[0] != experts:
            raise InvalidWeights(
                f"{file.path} has {name} of {record.shape[0]} experts, but an expert_count of {experts}"
            )


def _special_tokens(file: GGUFFile) -> dict[str, int]:
    tokens = {name: file.metadata.get(f"tokenizer.ggml.{name}") for name in ("bos_token_id", "eos_token_id")}
    for name, token in tokens.items():
        if token is not None and type(token) is not int:
            raise UnsupportedModel(f"{file.path} has tokenizer.ggml.{name} {shown(token)}; it must be a token's number")
    return {name: token for name, token in tokens.items() if token is not None}


def _from_tensors(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """What only the list of tensors tells."""
    if EMBEDDING not in file.tensors:
        raise InvalidWeights(f"{file.path} has no {EMBEDDING}: it is no complete model")
    first = [name for name in file.tensors if name.startswith("blk.0.")]
    switches = {
        switch: any(name.endswith(BIASES[switch]) for name in first) for switch in SWITCHES.get(architecture, ())
    }
    sizes = {"vocab_size": file.tensors[EMBEDDING].shape[0], "tie_word_embeddings": HEAD not in file.tensors}
    return sizes | switches
