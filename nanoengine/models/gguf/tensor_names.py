"""Names of tensors: those of llama.cpp in the words of Hugging Face, and how one comes out of the other.

Names: https://github.com/ggml-org/llama.cpp, src/llama-arch.cpp and gguf-py/gguf/tensor_mapping.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from nanoengine.models.gguf.changes import FILTERS, FLAT, LOG_RATE, ONE_LESS, ROW, Change
from nanoengine.models.gguf.gemma4_names import GEMMA4, GEMMA4_LAYER, GEMMA4_OUTER
from nanoengine.models.gguf.routers import num_experts

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
OF_CONFIG = (ROPE_FACTORS, ROPE_LONG, ROPE_SHORT)
"""Tensors that belong to the config."""

NOT_OF_TEXT = ("v.", "mm.", "a.", "mtp.", "cls.")
"""How tensors begin that see, hear, guess ahead, or judge."""

PACKED_QKVZ, PACKED_BA = "ssm_in.weight", "ssm_ba.weight"
"""Of Qwen3-Next: the first was written before the end of 2025."""

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LFM2 = ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM")
LFM2_OUTER = OUTER | dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm")
OUTERS = {
    **dict.fromkeys(LFM2, LFM2_OUTER),
    "FalconH1ForCausalLM": OUTER | {"output_norm": "model.final_layernorm"},
    GEMMA4: OUTER | GEMMA4_OUTER,
}
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS_BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
NORMS_AROUND = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NORMS_OF_DELTA_NETS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
"""Norms before attention and MLP, of OLMo 2 after them, or of Gemma both: the middle one has one name at Hugging Face's.
That before the MLPs of Qwen3-Next, Qwen3.5 and Seed-OSS has the name of one behind attention."""

GEMMA = {"Gemma2ForCausalLM", "Gemma3ForCausalLM"}
DELTA_NETS = {"Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}
GUESSING = DELTA_NETS | {"Glm4MoeForCausalLM"}
"""Architectures whose files may have layers behind the last, which guess ahead."""

SHIFTED = GEMMA | DELTA_NETS
"""Architectures whose norms are 1 + w at Hugging Face's, and w in these files; but for those of `MIXERS`."""

NORMS_OF_LFM2 = {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}
NORMS: dict[str, dict[str, str]] = {
    "GptOssForCausalLM": NORMS_BEFORE | NORMS_OF_DELTA_NETS,
    **dict.fromkeys(("Olmo2ForCausalLM", "Olmo3ForCausalLM", "Exaone4ForCausalLM"), NORMS_AFTER),
    "SeedOssForCausalLM": NORMS_OF_DELTA_NETS,
    "Glm4ForCausalLM": {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    **dict.fromkeys(LFM2, NORMS_OF_LFM2),
    "Glm4MoeForCausalLM": NORMS_OF_DELTA_NETS,
    "FalconH1ForCausalLM": {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"},
    **dict.fromkeys((*GEMMA, GEMMA4), NORMS_AROUND),
    **dict.fromkeys(DELTA_NETS, NORMS_OF_DELTA_NETS),
}
"""Architecture -> what its layers' norms are called, if not as in NORMS_BEFORE."""

EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
}
SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}

SEVERAL_SHARED = {name: found.replace("expert", "experts") for name, found in SHARED.items()}


def _numbered(prefix: str) -> dict[str, str]:
    """Experts whose matrices have numbers."""
    parts = {"gate": "w1", "down": "w2", "up": "w3"}
    return {"ffn_gate_inp": f"{prefix}.gate"} | {
        f"ffn_{part}_exps": f"{prefix}.experts.{{}}.{name}" for part, name in parts.items()
    }


OF_LFM2 = {
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
OWN: dict[str, dict[str, str]] = {
    **dict.fromkeys(("MixtralForCausalLM", "MiniMaxM2ForCausalLM"), _numbered("block_sparse_moe")),
    **dict.fromkeys(("Glm4MoeForCausalLM", "Dots1ForCausalLM", "Ernie4_5_MoeForCausalLM"), EXPERTS | SEVERAL_SHARED),
    **dict.fromkeys(("Qwen3MoeForCausalLM", "GraniteMoeForCausalLM"), EXPERTS),
    "GptOssForCausalLM": EXPERTS | {"attn_out": "self_attn.o_proj"},
    **dict.fromkeys(("Qwen2MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"), EXPERTS | SHARED),
    **dict.fromkeys(("GraniteMoeHybridForCausalLM", "GraniteMoeSharedForCausalLM"), EXPERTS | SHARED),
    "Llama4ForCausalLM": EXPERTS | SHARED,
    "Lfm2ForCausalLM": OF_LFM2,
    "Lfm2MoeForCausalLM": OF_LFM2 | _numbered("feed_forward"),
    "NemotronHForCausalLM": {
        "ffn_gate_inp": "mixer.gate",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
        **{f"ffn_{part}_exps": f"mixer.experts.{{}}.{part}_proj" for part in ("up", "down")},
        **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    },
    "FalconH1ForCausalLM": {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    GEMMA4: GEMMA4_LAYER,
    "Phi3ForCausalLM": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "Glm4ForCausalLM": {"ffn_up": "mlp.gate_up_proj"},
    "HunYuanDenseV1ForCausalLM": {
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
    },
}
"""Architecture -> what its layers have of their own, or otherwise; {} is the number of an expert, + stands between two that are
one tensor, one behind the other."""

PAIRED = {
    *("LlamaForCausalLM", "MixtralForCausalLM", "Ministral3ForCausalLM", "SmolLM3ForCausalLM", "GraniteForCausalLM"),
    *("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteMoeHybridForCausalLM"),
}
"""Architectures whose files have the rows of q and k in the order in which llama.cpp rotates them: a row beside the one that it
turns with, where Hugging Face has it half a head away."""

NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<what>\w+)\.(?P<kind>weight|bias)")


class HFTensor(NamedTuple):
    """A tensor of Hugging Face's, and how it comes out of the file's."""

    name: str
    paired_heads: int = 0
    """If not 0, how many heads there are whose rows must be taken apart: 0, 2, 4, ..., then 1, 3, 5, ..."""

    expert: int | None = None
    """Which one of those along the first dimension, if the file has all experts in one tensor."""

    half: int | None = None
    """Which half of its rows, if the file has two in one tensor."""

    change: Change | None = None


def _of_state(prefix: str) -> dict[str, HFTensor]:
    return {
        "ssm_a": HFTensor(f"{prefix}.A_log", change=LOG_RATE),
        **dict.fromkeys(("ssm_dt.bias", "ssm_dt"), HFTensor(f"{prefix}.dt_bias")),
        "ssm_conv1d.weight": HFTensor(f"{prefix}.conv1d.weight", change=FILTERS),
        "ssm_out.weight": HFTensor(f"{prefix}.out_proj.weight"),
    }


SHARED_GATE = {"ffn_gate_inp_shexp.weight": HFTensor("mlp.shared_expert_gate.weight", change=ROW)}
DELTA_NET = (
    _of_state("linear_attn")
    | {
        "ssm_norm.weight": HFTensor("linear_attn.norm.weight"),
        "attn_qkv.weight": HFTensor("linear_attn.in_proj_qkv.weight"),
        "attn_gate.weight": HFTensor("linear_attn.in_proj_z.weight"),
        "ssm_beta.weight": HFTensor("linear_attn.in_proj_b.weight"),
        "ssm_alpha.weight": HFTensor("linear_attn.in_proj_a.weight"),
        PACKED_QKVZ: HFTensor("linear_attn.in_proj_qkvz.weight"),
        PACKED_BA: HFTensor("linear_attn.in_proj_ba.weight"),
    }
    | SHARED_GATE
)
SHORT_CONV = {
    "shortconv.conv.weight": HFTensor("conv.conv.weight", change=FILTERS),
    "shortconv.in_proj.weight": HFTensor("conv.in_proj.weight"),
    "shortconv.out_proj.weight": HFTensor("conv.out_proj.weight"),
}
OF_GEMMA4 = {
    "layer_output_scale.weight": HFTensor("layer_scalar"),
    "ffn_gate_inp.scale": HFTensor("router.scale"),
    "ffn_down_exps.scale": HFTensor("router.per_expert_scale"),
}
CHOICE = "exp_probs_b.bias"
CHOICE_OF_GATE = {CHOICE: HFTensor("mlp.gate.e_score_correction_bias")}
NEMOTRON_H, FALCON_H1 = "NemotronHForCausalLM", "FalconH1ForCausalLM"
HYBRIDS = DELTA_NETS | {"GraniteMoeHybridForCausalLM", *LFM2, NEMOTRON_H, FALCON_H1}


def _mamba(prefix: str) -> dict[str, HFTensor]:
    return _of_state(prefix) | {
        "ssm_d": HFTensor(f"{prefix}.D", change=FLAT),
        "ssm_norm.weight": HFTensor(f"{prefix}.norm.weight", change=FLAT),
        "ssm_conv1d.bias": HFTensor(f"{prefix}.conv1d.bias"),
        "ssm_in.weight": HFTensor(f"{prefix}.in_proj.weight"),
    }


PARTS = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
PARTS |= {"ffn_up": "up_proj", "ffn_down": "down_proj"}
MIXERS: dict[str, dict[str, HFTensor]] = {
    **dict.fromkeys(DELTA_NETS, DELTA_NET),
    "Qwen2MoeForCausalLM": SHARED_GATE,
    "GptOssForCausalLM": dict.fromkeys(("attn_sinks.weight", "attn_sinks"), HFTensor("self_attn.sinks")),
    "GraniteMoeHybridForCausalLM": _mamba("mamba"),
    FALCON_H1: _mamba("mamba") | {"ffn_norm": HFTensor("pre_ff_layernorm.weight")},
    NEMOTRON_H: _mamba("mixer")
    | {f"{own}.{kind}": HFTensor(f"mixer.{name}.{kind}") for own, name in PARTS.items() for kind in ("weight", "bias")}
    | {"attn_norm.weight": HFTensor("norm.weight"), CHOICE: HFTensor("mixer.gate.e_score_correction_bias")},
    "Lfm2ForCausalLM": SHORT_CONV,
    "Lfm2MoeForCausalLM": SHORT_CONV | {CHOICE: HFTensor("feed_forward.expert_bias")},
    "MiniMaxM2ForCausalLM": {CHOICE: HFTensor("block_sparse_moe.e_score_correction_bias")},
    "Ernie4_5_MoeForCausalLM": {CHOICE: HFTensor("mlp.moe_statics.e_score_correction_bias", change=ROW)},
    **dict.fromkeys(("Glm4MoeForCausalLM", "Dots1ForCausalLM"), CHOICE_OF_GATE),
}
"""Architecture -> what is in layers with states, or changed otherwise than by name; biases that experts are chosen by, too."""


def hf_tensor(name: str, config: Mapping[str, Any]) -> list[HFTensor]:
    """What comes out of the tensor `name` of a file: many of experts, none of what belongs to the config, is not of text, or
    belongs to layers behind the last, which guess several tokens ahead; else one.

    A name that is not known stays as it is, so that whoever compares names calls it unexpected.

    Args:
        name: llama.cpp's.
        config: as `translate.hf_config` gives it.
    """
    architecture = config["architectures"][0]
    if name in OF_CONFIG or name.startswith(NOT_OF_TEXT):
        return []
    layer, _, own = name.removeprefix("blk.").partition(".")
    if name.startswith("blk.") and layer.isdecimal():
        if architecture in GUESSING and int(layer) >= config["num_hidden_layers"]:
            return []
        wholes = OF_GEMMA4 if architecture == GEMMA4 else MIXERS.get(architecture, {})
        if (whole := wholes.get(own)) is not None:
            return [whole._replace(name=f"model.layers.{layer}.{whole.name}")]
    match = NAME.fullmatch(name)
    norms = NORMS.get(architecture, NORMS_BEFORE)
    outer = OUTERS.get(architecture, OUTER)
    known = outer if match is None or match["layer"] is None else LAYER | norms | OWN.get(architecture, {})
    if match is None or match["what"] not in known:
        return [HFTensor(name)]
    what, kind = match["what"], match["kind"]
    found = f"{known[what]}.{kind}" if known is outer else f"model.layers.{match['layer']}.{known[what]}.{kind}"
    if "{}" in found and kind == "bias":  # one tensor has those of all experts
        return [HFTensor(found.replace(".{}.", ".").replace(".bias", "_bias"))]
    if "{}" in found:
        parts = known[what].split("+")
        return [
            HFTensor(
                f"model.layers.{match['layer']}.{part.format(number)}.{kind}",
                expert=number,
                half=half if len(parts) > 1 else None,
            )
            for number in range(num_experts(config))
            for half, part in enumerate(parts)
        ]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    change = ONE_LESS if architecture in SHIFTED and found.endswith("norm.weight") else None
    return [HFTensor(found, heads.get(what, 0) if architecture in PAIRED else 0, change=change)]
