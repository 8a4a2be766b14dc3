"""Names of tensors that are none, or not known; all others are read from files in tests/models/test_checkpoint.py."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.models.gguf.tensor_names import HFTensor, hf_tensor

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("name", ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"])
def test_what_belongs_to_the_config_is_no_tensor(name: str) -> None:
    assert hf_tensor(name, LLAMA) == []


@pytest.mark.parametrize(
    "name",
    [
        *("", "attn_q.weight", "output.weight.", "blk.x.attn_q.weight", "blk.0.attn_q", "blk.0.attn_q.scale"),
        *("blk.0.attn_qkv.weight", "blk.0.attn_sinks.weight", "blk.0.ffn_gate.3.weight", "blk.0.token_embd.weight"),
        "blk.1.post_attention_norm.weight",
    ],
)
def test_unknown_names_stay_as_they_are(name: str) -> None:
    assert hf_tensor(name, LLAMA) == [HFTensor(name)]
