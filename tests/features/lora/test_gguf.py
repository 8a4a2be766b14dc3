"""Adapters as PEFT saves them, over a GGUF file whose rows and inputs stand in another order than those of the model's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.features.lora.written import assert_logprobs, merged, write_adapter
from tests.models.families import engine, family_checkpoint
from tests.models.gguf.written import write_gguf

PROMPT = [(7 * i + 3) % 250 for i in range(40)]


@pytest.mark.parametrize("num_value_heads", [2, 6])  # as many as keys: in order; more: tiled
def test_value_heads_of_qwen35_are_found_where_the_file_has_them(tmp_path: Path, num_value_heads: int) -> None:
    folder = family_checkpoint(tmp_path / "model", "Qwen3.5", linear_num_value_heads=num_value_heads)
    path = write_gguf(folder, tmp_path / "model.gguf")
    model = AutoModelForCausalLM.from_pretrained(folder)
    linear = {name: own.weight.shape for name, own in model.named_modules() if isinstance(own, torch.nn.Linear)}
    linear.pop("lm_head")
    adapter = write_adapter(tmp_path / "adapter", linear, targets=".*", size=0.3)
    with torch.no_grad():
        right = merged(folder, adapter)(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
        assert (right - model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)).abs().max() > 0.1
    for file in (folder, path):
        with engine(file, tokenizer=str(folder), enable_lora=True) as llm:
            assert_logprobs(llm, PROMPT, adapter, right, 1e-3)
