"""Names of tensors against the table of the gguf package, which the converters use."""

from __future__ import annotations

from typing import Any

import pytest
from gguf import MODEL_ARCH, get_tensor_name_map

from nanoengine.gguf.tensor_names import LAYER, NORMS_AFTER, NORMS_AROUND, NORMS_BEFORE, OUTER, OWN, HFTensor, hf_tensor

ARCHES = {
    "LlamaForCausalLM": MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": MODEL_ARCH.QWEN3MOE,
    "Phi3ForCausalLM": MODEL_ARCH.PHI3,
    "GraniteForCausalLM": MODEL_ARCH.GRANITE,
    "Olmo2ForCausalLM": MODEL_ARCH.OLMO2,
    "Gemma2ForCausalLM": MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": MODEL_ARCH.GEMMA3,
}


def config(architecture: str) -> dict[str, Any]:
    counts = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts": 3}
    return {"architectures": [architecture]} | counts


def names(name: str, architecture: str = "LlamaForCausalLM") -> list[str]:
    return [tensor.name for tensor in hf_tensor(name, config(architecture))]


@pytest.mark.parametrize("architecture", ARCHES)
def test_names_are_those_that_the_converters_translate(architecture: str) -> None:
    table = get_tensor_name_map(ARCHES[architecture], 3)
    layer = LAYER | NORMS_BEFORE | NORMS_AFTER | NORMS_AROUND | OWN.get(architecture, {})
    translated = set()
    for theirs in [f"{base}.weight" for base in [*OUTER, *(f"blk.2.{base}" for base in layer)]]:
        for ours in names(theirs, architecture):
            known = table.get_name(ours, try_suffixes=(".weight",))
            if ours != theirs and known is not None:  # an architecture has not all of them; experts were stacked before
                assert known == theirs
                translated.add(theirs)
    assert len(translated) >= 3 + 6


def test_a_norm_before_and_one_after_are_kept_apart() -> None:
    assert names("blk.1.ffn_norm.weight") == ["model.layers.1.post_attention_layernorm.weight"]
    assert names("blk.1.post_attention_norm.weight") == ["blk.1.post_attention_norm.weight"]
    own = {name: names(f"blk.1.{name}.weight", "Olmo2ForCausalLM") for name in ("post_attention_norm", "post_ffw_norm")}
    assert own == {
        "post_attention_norm": ["model.layers.1.post_attention_layernorm.weight"],
        "post_ffw_norm": ["model.layers.1.post_feedforward_layernorm.weight"],
    }


def test_experts_come_one_by_one() -> None:
    assert hf_tensor("blk.5.ffn_down_exps.weight", config("Qwen3MoeForCausalLM")) == [
        HFTensor(f"model.layers.5.mlp.experts.{number}.down_proj.weight", expert=number) for number in range(3)
    ]
    mixtral = {kind: names(f"blk.0.ffn_{kind}_exps.weight", "MixtralForCausalLM")[2] for kind in ("gate", "up", "down")}
    experts = "model.layers.0.block_sparse_moe.experts.2"
    assert mixtral == {"gate": f"{experts}.w1.weight", "up": f"{experts}.w3.weight", "down": f"{experts}.w2.weight"}


@pytest.mark.parametrize(
    ("architecture", "paired"),
    [
        ("LlamaForCausalLM", True),
        ("MixtralForCausalLM", True),
        ("GraniteForCausalLM", True),
        ("Qwen2ForCausalLM", False),
        ("Qwen3ForCausalLM", False),
        ("Olmo2ForCausalLM", False),
        ("Gemma3ForCausalLM", False),
    ],
)
def test_rows_are_paired_where_llama_cpp_rotates_neighbours(architecture: str, paired: bool) -> None:
    found = {
        name: hf_tensor(f"blk.0.attn_{name}", config(architecture))[0].paired_heads
        for name in ("q.weight", "q.bias", "k.weight", "k.bias", "v.weight", "v.bias", "output.weight")
    }
    heads = {"q.weight": 4, "q.bias": 4, "k.weight": 2, "k.bias": 2} if paired else {}
    assert found == dict.fromkeys(found, 0) | heads


@pytest.mark.parametrize("name", ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"])
def test_what_belongs_to_the_config_is_no_tensor(name: str) -> None:
    assert hf_tensor(name, config("LlamaForCausalLM")) == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        "attn_q.weight",
        "output.weight.",
        "blk.x.attn_q.weight",
        "blk.0.attn_q",
        "blk.0.attn_q.scale",
        "blk.0.attn_qkv.weight",
        "blk.0.attn_sinks.weight",
        "blk.0.ffn_gate.3.weight",
        "blk.0.token_embd.weight",
    ],
)
def test_unknown_names_stay_as_they_are(name: str) -> None:
    assert hf_tensor(name, config("LlamaForCausalLM")) == [HFTensor(name)]


def test_norms_of_gemma_have_1_less_at_hugging_faces() -> None:
    layer = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "attn_q")
    found = {
        tensor.name.split(".")[-2]: tensor.offset
        for name in ("output_norm.weight", "token_embd.weight", *(f"blk.0.{name}.weight" for name in layer))
        for tensor in hf_tensor(name, config("Gemma3ForCausalLM"))
    }
    norms = ("norm", "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm")
    norms += ("post_feedforward_layernorm", "q_norm", "k_norm")
    assert found == dict.fromkeys(norms, -1.0) | {"embed_tokens": 0.0, "q_proj": 0.0}
