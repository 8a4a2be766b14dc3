"""What the metadata of a file says of a model, in the words of Hugging Face's config.json.

Keys: https://github.com/ggml-org/llama.cpp, src/llama-arch.cpp and conversion/.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from nanoengine.errors import InvalidWeights, UnsupportedModel, shown
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.gguf.hybrids import (
    DELTA_EXPERT_KEYS,
    DELTA_KEYS,
    FALCON_KEYS,
    LFM2_KEYS,
    MAMBA_KEYS,
    NEMOTRON_KEYS,
    OF_STATES,
    complete_hybrid,
)
from nanoengine.models.gguf.keys import Keys
from nanoengine.models.gguf.rope import EPSILON, rope_parameters
from nanoengine.models.gguf.routers import (
    DEEPSEEK_KEYS,
    ERNIE_KEYS,
    LFM2_MOE_KEYS,
    MINIMAX_KEYS,
    NORMALIZED,
    complete_router,
    num_experts,
)
from nanoengine.models.gguf.tensor_names import EMBEDDING, HEAD, HYBRIDS, NEMOTRON_H


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
    EPSILON: "rms_norm_eps",
}
"""What every file must say."""

MIXTURE_KEYS = {"expert_used_count": "num_experts_per_tok", "expert_count": "num_local_experts"}
QWEN_MOE_KEYS = {
    "expert_used_count": "num_experts_per_tok",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
WINDOW, WINDOWS = "attention.sliding_window", "attention.sliding_window_pattern"
WINDOW_KEYS = {WINDOW: "sliding_window"}
GRANITE_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GEMMA_KEYS = WINDOW_KEYS | {"final_logit_softcapping": "final_logit_softcapping"}
GEMMA_ACTIVATION = {"hidden_activation": "gelu_pytorch_tanh"}
MIXED = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
IS_SPLIT = {"linears_are_split": True}
"""Not Hugging Face's: matrices that its files have in one tensor are tensors for each, under the usual names."""

GROWTH = "attention.temperature_scale"
VARIANTS = {
    "llama": "expert_count",
    "mistral3": GROWTH,
    "olmo2": WINDOW,
    "granitemoe": "expert_shared_feed_forward_length",
}
"""Architectures that are two of Hugging Face's, and the key that the second has."""

LLAMA = Architecture("LlamaForCausalLM", "llama")
QWEN2, QWEN3 = Architecture("Qwen2ForCausalLM", "qwen2"), Architecture("Qwen3ForCausalLM", "qwen3")
QWEN3_MOE = Architecture("Qwen3MoeForCausalLM", "qwen3_moe", QWEN_MOE_KEYS, MIXED)
OLMO3 = Architecture("Olmo3ForCausalLM", "olmo3", WINDOW_KEYS)
GPT_OSS = Architecture(
    *("GptOssForCausalLM", "gpt_oss", WINDOW_KEYS | MIXTURE_KEYS | {"expert_feed_forward_length": "intermediate_size"}),
    fixed=IS_SPLIT,
    fits_float16=False,
)
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
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        QWEN_MOE_KEYS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        MIXED | {"norm_topk_prob": False},
    ),
    "qwen2vl": QWEN2,
    "qwen25vl": QWEN2,  # Ollama's name
    "qwen3": QWEN3,
    "qwen3moe": QWEN3_MOE,
    "qwen3vl": QWEN3,
    "qwen3vlmoe": QWEN3_MOE,
    "phi3": Architecture("Phi3ForCausalLM", "phi3", WINDOW_KEYS),
    "granite": Architecture("GraniteForCausalLM", "granite", GRANITE_KEYS),
    "granitemoe": Architecture("GraniteMoeForCausalLM", "granitemoe", GRANITE_KEYS | MIXTURE_KEYS, IS_SPLIT),
    "granitemoe with expert_shared_feed_forward_length": Architecture(
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        GRANITE_KEYS | MIXTURE_KEYS | {"expert_shared_feed_forward_length": "shared_intermediate_size"},
        IS_SPLIT,
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2"),
    "olmo2 with attention.sliding_window": OLMO3,
    "olmo3": OLMO3,  # Ollama's name
    "gpt-oss": GPT_OSS,
    "gptoss": GPT_OSS,  # Ollama's name
    "gemma2": Architecture(
        *("Gemma2ForCausalLM", "gemma2", GEMMA_KEYS | {"attn_logit_softcapping": "attn_logit_softcapping"}),
        activation=GEMMA_ACTIVATION,
        fits_float16=False,
    ),
    "gemma3": Architecture(
        *("Gemma3ForCausalLM", "gemma3_text", GEMMA_KEYS),
        activation=GEMMA_ACTIVATION,
        fits_float16=False,
    ),
    "seed_oss": Architecture("SeedOssForCausalLM", "seed_oss"),
    "glm4": Architecture("Glm4ForCausalLM", "glm4", fixed={"partial_rotary_factor": 1.0}),
    "exaone4": Architecture("Exaone4ForCausalLM", "exaone4", WINDOW_KEYS, {"sliding_window": None}),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5"),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    # Kernels of layers with states know no float16.
    "lfm2": Architecture("Lfm2ForCausalLM", "lfm2", LFM2_KEYS, {"block_auto_adjust_ff_dim": False}, {}, False),
    "lfm2moe": Architecture(
        *("Lfm2MoeForCausalLM", "lfm2_moe", LFM2_KEYS | LFM2_MOE_KEYS), activation={}, fits_float16=False
    ),
    "glm4moe": Architecture("Glm4MoeForCausalLM", "glm4_moe", DEEPSEEK_KEYS),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", "minimax_m2", MINIMAX_KEYS),
    "ernie4_5-moe": Architecture("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", ERNIE_KEYS),
    "dots1": Architecture("Dots1ForCausalLM", "dots1", DEEPSEEK_KEYS, {"sliding_window": None}),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM", "qwen3_next", DELTA_KEYS | DELTA_EXPERT_KEYS, MIXED, fits_float16=False
    ),
    "qwen35": Architecture("Qwen3_5ForCausalLM", "qwen3_5_text", DELTA_KEYS, fits_float16=False),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", DELTA_KEYS | DELTA_EXPERT_KEYS, MIXED, fits_float16=False
    ),
    "falcon-h1": Architecture("FalconH1ForCausalLM", "falcon_h1", FALCON_KEYS, fits_float16=False),
    "nemotron_h": Architecture(
        *("NemotronHForCausalLM", "nemotron_h", NEMOTRON_KEYS),
        activation={"mlp_hidden_act": "relu2"},
        fits_float16=False,
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        GRANITE_KEYS | MAMBA_KEYS,
        IS_SPLIT,
        fits_float16=False,
    ),
}
"""Architectures by llama.cpp's names."""

ZERO_IS_NONE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")

PATTERNED = ("Gemma3ForCausalLM", "Olmo3ForCausalLM", "GptOssForCausalLM", "Exaone4ForCausalLM")
"""Architectures whose layers have windows by a pattern; it has a default. The last may have none."""

GEMMA_27B_LAYERS = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}
"""How llama.cpp knows those whose scores are scaled by hidden_size / heads, and not by the size of a head."""

BIASES = {
    "attention_bias": (".attn_q.bias", ".attn_k.bias", ".attn_v.bias", ".attn_output.bias"),
    "attention_out_bias": (".attn_output.bias",),
    "use_bias": (".attn_output.bias",),
    "mlp_bias": (".ffn_gate.bias", ".ffn_up.bias", ".ffn_down.bias"),
}
"""Switches of a config -> the tensors that say that they are on."""

SWITCHES = {
    **dict.fromkeys(("LlamaForCausalLM", "GraniteForCausalLM", "SmolLM3ForCausalLM"), ("attention_bias", "mlp_bias")),
    **dict.fromkeys(("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"), ("attention_bias",)),
    **dict.fromkeys(("Olmo2ForCausalLM", "Olmo3ForCausalLM"), ("attention_bias",)),
    "SeedOssForCausalLM": ("attention_bias", "attention_out_bias", "mlp_bias"),
    "Glm4ForCausalLM": ("attention_bias",),
    "Ernie4_5ForCausalLM": ("use_bias",),
    "HunYuanDenseV1ForCausalLM": ("attention_bias",),
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
    keys = Keys(file, [name for name in ARCHITECTURES if " " not in name])
    more = VARIANTS.get(keys.architecture)
    is_variant = more is not None and keys.number(more, default=0) > 0
    ours = ARCHITECTURES[f"{keys.architecture} with {more}" if is_variant else keys.architecture]
    config: dict[str, Any] = {
        "architectures": [ours.name],
        "model_type": ours.model_type,
        "dtype": _dtype(file, ours),
        **ours.activation,
    }
    unsaid: dict[str, float] = {"feed_forward_length": 1} if ours.fixed is MIXED else {}  # no layer is without experts
    if ours.name == "Gemma3ForCausalLM":  # Ollama's files of those that see pictures
        unsaid = {EPSILON: 1e-6}
    has_gaps = {"some_have_none": ours.name == NEMOTRON_H}
    config |= {**ours.fixed} | {
        name: keys.number(key, unsaid.get(key), **has_gaps) for key, name in COMMON_KEYS.items()
    }
    stated = (key for key in ours.keys if key in keys or key.startswith(OF_STATES))
    config |= {ours.keys[key]: keys.number(key) for key in stated}
    config |= _heads(keys, config, ours)
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
        if ours.name != "Exaone4ForCausalLM" and not keys.number(WINDOW):
            raise keys.unsupported(WINDOW, 0, "a number of tokens")
        config |= _layer_types(keys, config["num_hidden_layers"])
    if ours.name == "Llama4ForCausalLM":  # as llama.cpp knows Maverick from Scout; Ollama says it
        config["use_qk_norm"] = keys.flag("use_qk_norm", default=config.get("num_local_experts") != 128)
    config["rope_parameters"] = rope = rope_parameters(file, keys, config)
    if ours.name == "Ministral3ForCausalLM":
        period = keys.number("rope.scaling.original_context_length", default=config["max_position_embeddings"])
        if (other := keys.number("attention.temperature_length", default=period)) != period:
            raise keys.unsupported("attention.temperature_length", other, f"the original_context_length, {period}")
        rope |= {"llama_4_scaling_beta": keys.number(GROWTH), "original_max_position_embeddings": period}
    if ours.name == "Phi3ForCausalLM":  # which reads it there alone
        config["original_max_position_embeddings"] = rope.get("original_max_position_embeddings", 4096)
    keys.check_rest()
    _check_experts(file, num_experts(config))
    return config | _special_tokens(file) | _from_tensors(file, ours.name)


def _layer_types(keys: Keys, layers: int) -> dict[str, list[str]]:
    """Which layers have a window, as a file says it: of each layer, or that every n-th has none."""
    if WINDOWS not in keys:
        return {}
    if keys.is_list(WINDOWS):
        slides = keys.each(WINDOWS, layers)
    else:
        period = keys.number(WINDOWS)
        slides = [(i + 1) % (period or layers + 1) for i in range(layers)]
    return {"layer_types": ["sliding_attention" if own else "full_attention" for own in slides]}


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
    share = config["hidden_size"] // max(heads, 1)
    size = keys.number("attention.key_length", default=keys.number("attention.head_dim", default=share))
    if size < 1:
        raise keys.unsupported("attention.head_count", heads, "1 to embedding_length")
    if (other := keys.number("attention.value_length", default=size)) != size:
        raise keys.unsupported("attention.value_length", other, f"the key_length, {size}")
    is_hybrid = ours.name in HYBRIDS
    shared = keys.number("attention.head_count_kv", default=heads, some_have_none=is_hybrid)
    return {"num_key_value_heads": shared, "head_dim": size}


def _complete_granite(keys: Keys, config: dict[str, Any]) -> None:
    """What llama.cpp and Hugging Face differ about, if it is left out."""
    if config["architectures"][0] not in HYBRIDS and not keys.flag("rope.scaling.finetuned", default=True):
        raise keys.unsupported("rope.scaling.finetuned", False, "true: heads that are rotated")
    if not config.get("attention_multiplier"):
        config["attention_multiplier"] = config["head_dim"] ** -0.5


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
