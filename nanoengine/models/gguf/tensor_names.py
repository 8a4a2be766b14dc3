"""Names of tensors: Hugging Face's for those of llama.cpp, and the conversion of the tensors.

Names: https://github.com/ggml-org/llama.cpp, src/llama-arch.cpp and gguf-py/gguf/tensor_mapping.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from nanoengine.models.gguf.changes import FILTERS, FLAT, LOG_RATE, ONE_LESS, ROW, Change
from nanoengine.models.gguf.routers import num_experts

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
OF_CONFIG = (ROPE_FACTORS, ROPE_LONG, ROPE_SHORT)
"""Tensors that belong to the config."""

NOT_OF_TEXT = ("v.", "mm.", "a.", "mtp.", "cls.")
"""Prefixes of tensors of images, audio, multi-token prediction and classifiers."""

PACKED_QKVZ, PACKED_BA = "ssm_in.weight", "ssm_ba.weight"
"""Of Qwen3-Next: the first was written before the end of 2025."""

GEMMA4, NEMOTRON_H, FALCON_H1 = "Gemma4ForCausalLM", "NemotronHForCausalLM", "FalconH1ForCausalLM"
LFM2 = ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM")
OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
LFM2_OUTER = OUTER | dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm")
OUTERS = {**dict.fromkeys(LFM2, LFM2_OUTER), FALCON_H1: OUTER | {"output_norm": "model.final_layernorm"}}
PROJECTIONS = {f"ffn_{part}": f"{part}_proj" for part in ("gate", "up", "down")}
EXPERT_BIAS = "exp_probs_b.bias"
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **dict.fromkeys(("ffn_norm", "post_attention_norm"), "post_attention_layernorm"),
    "post_ffw_norm": "post_feedforward_layernorm",
    **{name: f"mlp.{module}" for name, module in PROJECTIONS.items()},
    "ffn_gate_inp": "mlp.gate",
    EXPERT_BIAS: "mlp.gate.e_score_correction_bias",
    **{f"{name}_exps": f"mlp.experts.{{}}.{module}" for name, module in PROJECTIONS.items()},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"{name}_shexp": f"mlp.shared_expert.{module}" for name, module in PROJECTIONS.items()},
}
"""Modules of a layer, of any architecture; a tensor that an architecture does not have is unexpected for the loader."""

SHARED_EXPERTS = {f"{name}_shexp": f"mlp.shared_experts.{module}" for name, module in PROJECTIONS.items()}
GEMMA = {"Gemma2ForCausalLM", "Gemma3ForCausalLM"}
DELTA_NETS = {"Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}
PREDICTING = DELTA_NETS | {"Glm4MoeForCausalLM"}
"""Architectures whose files may have layers of multi-token prediction behind the last layer."""

SHIFTED = GEMMA | DELTA_NETS
"""Architectures whose norms, except `ssm_norm`, multiply by 1 + weight at Hugging Face's, and by the weight in GGUF files."""


def _numbered(prefix: str) -> dict[str, str]:
    """Router and experts of an MLP whose matrices have numbers."""
    parts = {"gate": "w1", "down": "w2", "up": "w3"}
    return {"ffn_gate_inp": f"{prefix}.gate"} | {
        f"ffn_{part}_exps": f"{prefix}.experts.{{}}.{name}" for part, name in parts.items()
    }


OF_GEMMA = {"ffn_norm": "pre_feedforward_layernorm"}
OF_GEMMA4 = OF_GEMMA | {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps": "experts.{}.gate_proj+experts.{}.up_proj",
    "ffn_down_exps": "experts.{}.down_proj",
}
OF_LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
}


def _state_space(module: str) -> dict[str, str]:
    """Tensors that all layers with recurrent states have."""
    return {
        "ssm_a": f"{module}.A_log",
        **dict.fromkeys(("ssm_dt.bias", "ssm_dt"), f"{module}.dt_bias"),
        "ssm_conv1d": f"{module}.conv1d",
        "ssm_norm": f"{module}.norm",
        "ssm_out": f"{module}.out_proj",
    }


def _mamba(module: str) -> dict[str, str]:
    return _state_space(module) | {"ssm_d": f"{module}.D", "ssm_in": f"{module}.in_proj"}


DELTA_NET = _state_space("linear_attn") | {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    PACKED_QKVZ: "linear_attn.in_proj_qkvz.weight",
    PACKED_BA: "linear_attn.in_proj_ba.weight",
}
HYBRIDS = DELTA_NETS | {"GraniteMoeHybridForCausalLM", *LFM2, NEMOTRON_H, FALCON_H1}
NAMES: dict[str, dict[str, str]] = {
    **dict.fromkeys(GEMMA, OF_GEMMA),
    "Glm4ForCausalLM": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "MixtralForCausalLM": _numbered("block_sparse_moe"),
    "MiniMaxM2ForCausalLM": _numbered("block_sparse_moe") | {EXPERT_BIAS: "block_sparse_moe.e_score_correction_bias"},
    **dict.fromkeys(("Glm4MoeForCausalLM", "Dots1ForCausalLM"), SHARED_EXPERTS),
    "Ernie4_5_MoeForCausalLM": SHARED_EXPERTS | {EXPERT_BIAS: "mlp.moe_statics.e_score_correction_bias"},
    "GptOssForCausalLM": {"attn_out": "self_attn.o_proj"}
    | dict.fromkeys(("attn_sinks.weight", "attn_sinks"), "self_attn.sinks"),
    **dict.fromkeys(DELTA_NETS, DELTA_NET),
    "GraniteMoeHybridForCausalLM": _mamba("mamba"),
    "Lfm2ForCausalLM": OF_LFM2,
    "Lfm2MoeForCausalLM": OF_LFM2 | _numbered("feed_forward") | {EXPERT_BIAS: "feed_forward.expert_bias"},
    NEMOTRON_H: _mamba("mixer")
    | {name: f"mixer.{module.rpartition('.')[2]}" for name, module in LAYER.items()}
    | {f"ffn_{part}_exps": f"mixer.experts.{{}}.{part}_proj" for part in ("up", "down")}
    | {f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")}
    | {
        "attn_norm": "norm",
        "ffn_gate_inp": "mixer.gate",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
        EXPERT_BIAS: "mixer.gate.e_score_correction_bias",
    },
    FALCON_H1: _mamba("mamba")
    | {name: f"feed_forward.{module}" for name, module in PROJECTIONS.items()}
    | dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight"),
    GEMMA4: OF_GEMMA4,
    "Phi3ForCausalLM": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "HunYuanDenseV1ForCausalLM": {
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
    },
}
"""Architecture -> modules and tensors of its layers that differ from LAYER; {} is the number of an expert, + joins two that are
stacked in one tensor."""

PAIRED = {
    *("LlamaForCausalLM", "MixtralForCausalLM", "Ministral3ForCausalLM", "SmolLM3ForCausalLM", "GraniteForCausalLM"),
    *("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteMoeHybridForCausalLM"),
}
"""Architectures whose files have rows of q and k in llama.cpp's order: the two rows of a rotated pair are adjacent, where Hugging
Face's are half a head apart."""


class HFTensor(NamedTuple):
    """A tensor of Hugging Face's, as a part of a tensor of the file."""

    name: str
    paired_heads: int = 0
    """If not 0, the number of heads whose rows are reordered: 0, 2, 4, ..., then 1, 3, 5, ..."""

    expert: int | None = None
    """Its index along the first dimension, if the file has all experts in one tensor."""

    half: int | None = None
    """The half of the rows, if the file has two matrices in one tensor."""

    change: Change | None = None


BARE = ("ssm_a", "ssm_d", "ssm_dt", "attn_sinks", "ffn_norm")
"""Tensors that may be named without ".weight" or ".bias"."""

CHANGES = {
    ".A_log": LOG_RATE,
    ".D": FLAT,
    **dict.fromkeys(("mamba.norm.weight", "mixer.norm.weight"), FLAT),
    **dict.fromkeys(("conv1d.weight", "conv.conv.weight"), FILTERS),
    **dict.fromkeys(("shared_expert_gate.weight", "moe_statics.e_score_correction_bias"), ROW),
}
"""Endings of the names of tensors whose numbers or shapes differ -> the change."""


def hf_tensor(name: str, config: Mapping[str, Any]) -> list[HFTensor]:
    """The tensors of Hugging Face in the tensor `name` of a file: one for each expert of a stack, else one.

    There is none for tensors of the config, of other modalities, and of layers of multi-token prediction. An unknown name stays
    as it is: the loader then reports it as unexpected.

    Args:
        name: llama.cpp's.
        config: as `translate.hf_config` returns it.
    """
    architecture = config["architectures"][0]
    if name in OF_CONFIG or name.startswith(NOT_OF_TEXT):
        return []
    layer, _, in_layer = name.removeprefix("blk.").partition(".")
    prefix, local, names = "", name, OUTERS.get(architecture, OUTER)
    if name.startswith("blk.") and layer.isdecimal():
        if architecture in PREDICTING and int(layer) >= config["num_hidden_layers"]:
            return []
        prefix, local = f"model.layers.{layer}.", in_layer
        names = LAYER | NAMES.get(architecture, {})
    module, _, kind = local.rpartition(".")
    if local in names and (module or local in BARE):
        hf_name = names[local]
    elif module in names and kind in ("weight", "bias"):
        hf_name = f"{names[module]}.{kind}"
    else:
        return [HFTensor(name)]
    if "{}" in hf_name and kind == "bias":  # one tensor has those of all experts
        return [HFTensor(prefix + hf_name.replace(".{}.", ".").replace(".bias", "_bias"))]
    if "{}" in hf_name:
        parts = names[module].split("+")
        return [
            HFTensor(f"{prefix}{part.format(expert)}.{kind}", expert=expert, half=half if len(parts) > 1 else None)
            for expert in range(num_experts(config))
            for half, part in enumerate(parts)
        ]
    change = next((change for ending, change in CHANGES.items() if hf_name.endswith(ending)), None)
    if architecture in SHIFTED and hf_name.endswith("norm.weight") and module != "ssm_norm":
        change = ONE_LESS
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return [HFTensor(prefix + hf_name, heads.get(module, 0) if architecture in PAIRED else 0, change=change)]
