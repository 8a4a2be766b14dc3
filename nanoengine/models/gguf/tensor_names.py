"""Names of tensors: those of llama.cpp in the words of Hugging Face, and how one comes out of the other.

Names: https://github.com/ggml-org/llama.cpp, src/llama-arch.cpp and gguf-py/gguf/tensor_mapping.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
OF_CONFIG = (ROPE_FACTORS, ROPE_LONG, ROPE_SHORT)
"""Tensors that belong to the config."""

PACKED_QKVZ, PACKED_BA = "ssm_in.weight", "ssm_ba.weight"
"""Of Qwen3-Next: the first was written before the end of 2025."""

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
GEMMA4_OUTER = OUTER | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
LFM2_OUTER = OUTER | dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm")
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
That before the MLPs of Qwen3-Next and Qwen3.5 has the name of one behind attention."""

GEMMA = {"Gemma2ForCausalLM", "Gemma3ForCausalLM"}
GEMMA4 = "Gemma4ForCausalLM"
DELTA_NETS = {"Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}
SHIFTED = GEMMA | DELTA_NETS
"""Architectures whose norms are 1 + w at Hugging Face's, and w in these files; but for those of `MIXERS`."""

NORMS: dict[str, dict[str, str]] = {
    "Olmo2ForCausalLM": NORMS_AFTER,
    "Lfm2ForCausalLM": {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"},
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

OWN: dict[str, dict[str, str]] = {
    "MixtralForCausalLM": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    },
    "Qwen3MoeForCausalLM": EXPERTS,
    **dict.fromkeys(("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "GraniteMoeHybridForCausalLM"), EXPERTS | SHARED),
    "Lfm2ForCausalLM": {
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
    },
    GEMMA4: {
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_up_exps": "experts.{}.gate_proj+experts.{}.up_proj",
        "ffn_down_exps": "experts.{}.down_proj",
    },
    "Phi3ForCausalLM": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
"""Architecture -> what its layers have of their own, or otherwise; {} is the number of an expert, + stands between two that are
one tensor, one behind the other."""

PAIRED = {"LlamaForCausalLM", "MixtralForCausalLM", "GraniteForCausalLM", "GraniteMoeHybridForCausalLM"}
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

    change: Callable[[Tensor], Tensor] | None = None
    """Makes Hugging Face's numbers of the file's; it is called with tensors on the device "meta", too."""


def _one_less(numbers: Tensor) -> Tensor:
    return numbers.float() - 1.0


def _filters(taps: Tensor) -> Tensor:
    """[channels, taps] as torch's convolutions have it."""
    return taps.reshape(*taps.shape[:1], 1, *taps.shape[1:])


def _log_rate(rate: Tensor) -> Tensor:
    """llama.cpp has -exp of it, with a second dimension or without."""
    return (-rate.float()).log().flatten()


def _flat(numbers: Tensor) -> Tensor:
    return numbers.flatten()


def _row(numbers: Tensor) -> Tensor:
    return numbers.view(1, -1)


def _of_state(prefix: str) -> dict[str, HFTensor]:
    return {
        "ssm_a": HFTensor(f"{prefix}.A_log", change=_log_rate),
        "ssm_dt.bias": HFTensor(f"{prefix}.dt_bias"),
        "ssm_conv1d.weight": HFTensor(f"{prefix}.conv1d.weight", change=_filters),
        "ssm_out.weight": HFTensor(f"{prefix}.out_proj.weight"),
    }


DELTA_NET = _of_state("linear_attn") | {
    "ssm_norm.weight": HFTensor("linear_attn.norm.weight"),
    "attn_qkv.weight": HFTensor("linear_attn.in_proj_qkv.weight"),
    "attn_gate.weight": HFTensor("linear_attn.in_proj_z.weight"),
    "ssm_beta.weight": HFTensor("linear_attn.in_proj_b.weight"),
    "ssm_alpha.weight": HFTensor("linear_attn.in_proj_a.weight"),
    PACKED_QKVZ: HFTensor("linear_attn.in_proj_qkvz.weight"),
    PACKED_BA: HFTensor("linear_attn.in_proj_ba.weight"),
    "ffn_gate_inp_shexp.weight": HFTensor("mlp.shared_expert_gate.weight", change=_row),
}
OF_GEMMA4 = {
    "layer_output_scale.weight": HFTensor("layer_scalar"),
    "ffn_gate_inp.scale": HFTensor("router.scale"),
    "ffn_down_exps.scale": HFTensor("router.per_expert_scale"),
}
MIXERS: dict[str, dict[str, HFTensor]] = {
    **dict.fromkeys(DELTA_NETS, DELTA_NET),
    "GraniteMoeHybridForCausalLM": _of_state("mamba")
    | {
        "ssm_d": HFTensor("mamba.D", change=_flat),
        "ssm_norm.weight": HFTensor("mamba.norm.weight", change=_flat),
        "ssm_conv1d.bias": HFTensor("mamba.conv1d.bias"),
        "ssm_in.weight": HFTensor("mamba.in_proj.weight"),
    },
    "Lfm2ForCausalLM": {
        "shortconv.conv.weight": HFTensor("conv.conv.weight", change=_filters),
        "shortconv.in_proj.weight": HFTensor("conv.in_proj.weight"),
        "shortconv.out_proj.weight": HFTensor("conv.out_proj.weight"),
    },
}
"""Architecture -> what is in layers with states, or changed otherwise than by name."""


def hf_tensor(name: str, config: Mapping[str, Any]) -> list[HFTensor]:
    """What comes out of the tensor `name` of a file: many of experts, none of what belongs to the config, or to layers behind the
    last, which guess several tokens ahead; else one.

    A name that is not known stays as it is, so that whoever compares names calls it unexpected.

    Args:
        name: llama.cpp's.
        config: as `translate.hf_config` gives it.
    """
    architecture = config["architectures"][0]
    if name in OF_CONFIG:
        return []
    layer, _, own = name.removeprefix("blk.").partition(".")
    if name.startswith("blk.") and layer.isdecimal():
        if architecture in DELTA_NETS and int(layer) >= config["num_hidden_layers"]:
            return []
        wholes = OF_GEMMA4 if architecture == GEMMA4 else MIXERS.get(architecture, {})
        if (whole := wholes.get(own)) is not None:
            return [whole._replace(name=f"model.layers.{layer}.{whole.name}")]
    match = NAME.fullmatch(name)
    norms = NORMS.get(architecture, NORMS_BEFORE)
    outer = {"Lfm2ForCausalLM": LFM2_OUTER, GEMMA4: GEMMA4_OUTER}.get(architecture, OUTER)
    known = outer if match is None or match["layer"] is None else LAYER | norms | OWN.get(architecture, {})
    if match is None or match["what"] not in known:
        return [HFTensor(name)]
    what, kind = match["what"], match["kind"]
    found = f"{known[what]}.{kind}" if known is outer else f"model.layers.{match['layer']}.{known[what]}.{kind}"
    if "{}" in found:
        experts = config.get("num_experts", config.get("num_local_experts", 0))
        parts = known[what].split("+")
        return [
            HFTensor(
                f"model.layers.{match['layer']}.{part.format(number)}.{kind}",
                expert=number,
                half=half if len(parts) > 1 else None,
            )
            for number in range(experts)
            for half, part in enumerate(parts)
        ]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    change = _one_less if architecture in SHIFTED and found.endswith("norm.weight") else None
    return [HFTensor(found, heads.get(what, 0) if architecture in PAIRED else 0, change=change)]
