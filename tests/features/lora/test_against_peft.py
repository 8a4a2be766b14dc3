"""Adapters that PEFT itself has made and saved, against the same in PEFT, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.features.lora.written import assert_logprobs
from tests.models.families import engine, family_checkpoint

peft = pytest.importorskip("peft", reason="peft is not installed; `pip install -e .[dev]` brings it")

PROMPT = [(7 * i + 3) % 250 for i in range(40)]
CONFIGS: dict[str, dict[str, Any]] = {
    "a list": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "all linear layers, rsLoRA": {"r": 4, "lora_alpha": 3, "target_modules": "all-linear", "use_rslora": True},
    "an expression": {"r": 3, "target_modules": r".*layers\.1\..*\.(k_proj|o_proj|up_proj)"},
    "patterns": {
        "r": 4,
        "target_modules": ["q_proj", "o_proj", "down_proj", "gate_proj"],
        "rank_pattern": {"q_proj": 9, "layers.0.mlp.down_proj": 2},
        "alpha_pattern": {"down_proj": 20, "model.layers.1.self_attn.q_proj": 1},
    },
    "some layers": {"r": 4, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    "fused": {"r": 5, "target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_are_those_of_peft(tmp_path: Path, name: str) -> None:
    folder = family_checkpoint(tmp_path / "model", "Phi3" if name == "fused" else "Llama", seed=2)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **CONFIGS[name])).eval()
    torch.manual_seed(1)
    changed = [own for key, own in model.named_parameters() if "lora_" in key]
    for own in changed:
        own.data.normal_(0, 0.2)
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        right = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
        with model.disable_adapter():
            plain = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert (right - plain).abs().max() > 0.1
    with engine(folder, enable_lora=True) as llm:
        assert_logprobs(llm, PROMPT, tmp_path / "adapter", right, 1e-4)
