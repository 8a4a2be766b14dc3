"""Names of tensors: those of llama.cpp in the words of Hugging Face, and how one comes out of the other.

Names: https://github.com/ggml-org/llama.cpp, src/llama-arch.cpp and gguf-py/gguf/tensor_mapping.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors that belong to the config."""

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
"""Norms before attention and MLP, of OLMo 2 after them, or of Gemma both: the middle one has one name at Hugging Face's."""

GEMMA = {"Gemma2ForCausalLM", "Gemma3ForCausalLM"}
"""Architectures whose norms are 1 + w at Hugging Face's, and w in these files."""

NORMS: dict[str, dict[str, str]] = {"Olmo2ForCausalLM": NORMS_AFTER} | dict.fromkeys(GEMMA, NORMS_AROUND)
"""Architecture -> what its layers' norms are called, if not as in NORMS_BEFORE."""

OWN: dict[str, dict[str, str]] = {
    "MixtralForCausalLM": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    },
    "Qwen3MoeForCausalLM": {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
    },
    "Phi3ForCausalLM": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
"""Architecture -> what its layers have of their own, or otherwise; {} is the number of an expert."""

PAIRED = {"LlamaForCausalLM", "MixtralForCausalLM", "GraniteForCausalLM"}
"""Architectures whose files have the rows of q and k in the order in which llama.cpp rotates them: a row beside the one that it
turns with, where Hugging Face has it half a head away."""

NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<what>\w+)\.(?P<kind>weight|bias)")


class HFTensor(NamedTuple):
    """A tensor of Hugging Face's, and how it comes out of the file's."""

    name: str
    paired_heads: int = 0
    """If not 0, how many heads there are whose rows must be taken apart: 0, 2, 4, ..., then 1, 3, 5, ..."""

    offset: float = 0.0
    """What is added to its numbers."""

    expert: int | None = None
    """Which one of those along the first dimension, if the file has all experts in one tensor."""


def hf_tensor(name: str, config: Mapping[str, Any]) -> list[HFTensor]:
    """What comes out of the tensor `name` of a file: none of what belongs to the config, many of experts, else one.

    A name that is not known stays as it is, so that whoever compares names calls it unexpected.

    Args:
        name: llama.cpp's.
        config: as `translate.hf_config` gives it.
    """
    architecture = config["architectures"][0]
    if name in (ROPE_FACTORS, ROPE_LONG, ROPE_SHORT):
        return []
    match = NAME.fullmatch(name)
    norms = NORMS.get(architecture, NORMS_BEFORE)
    known = OUTER if match is None or match["layer"] is None else LAYER | norms | OWN.get(architecture, {})
    if match is None or match["what"] not in known:
        return [HFTensor(name)]
    what, kind = match["what"], match["kind"]
    found = f"{known[what]}.{kind}" if known is OUTER else f"model.layers.{match['layer']}.{known[what]}.{kind}"
    if "{}" in found:
        experts = config["num_local_experts" if architecture == "MixtralForCausalLM" else "num_experts"]
        return [HFTensor(found.format(number), expert=number) for number in range(experts)]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    offset = -1.0 if architecture in GEMMA and found.endswith("norm.weight") else 0.0
    return [HFTensor(found, heads.get(what, 0) if architecture in PAIRED else 0, offset)]
