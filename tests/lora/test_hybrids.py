"""Adapters of layers with states, of a folder and of the GGUF file made of it, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanoengine import LLM, LoRARequest, SamplingParams
from tests.gguf.written_hybrids import write_hybrid
from tests.lora.written import merged, write_adapter
from tests.models.families import family_checkpoint

PROMPT = [(7 * i + 3) % 250 for i in range(45)]
SHAPES: dict[str, dict[str, Any]] = {"LFM2": {}, "Qwen3.5": {"linear_num_value_heads": 6}}
"""Heads of the second that share queries and keys stand apart in the file."""


@pytest.mark.parametrize("shape", SHAPES)
def test_all_linear_layers_of_a_folder_and_of_a_file(tmp_path: Path, shape: str) -> None:
    folder = family_checkpoint(tmp_path / "model", shape, seed=2, **SHAPES[shape])
    modules = AutoModelForCausalLM.from_pretrained(folder).named_modules()
    linear = {name: own.weight.shape for name, own in modules if isinstance(own, torch.nn.Linear) and name != "lm_head"}
    ends = {name.rpartition(".")[2] for name in linear}
    adapter = write_adapter(tmp_path / "adapter", linear, 3, targets=sorted(ends), size=0.2)
    with torch.no_grad():
        right = merged(folder, adapter)(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    options = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 20, "max_model_len": 256, "enable_lora": True}
    for path in (folder, write_hybrid(folder, tmp_path / "model.gguf")):
        with LLM(str(path), tokenizer=str(folder), use_tqdm=False, **options) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=5, logprobs=5)
            wanted = LoRARequest("own", 1, str(adapter))
            (output,) = llm.generate([PROMPT], params, lora_request=wanted, use_tqdm=False)
        for at, entries in enumerate([*(output.prompt_logprobs or ())[1:], *(output.outputs[0].logprobs or ())]):
            assert all(abs(right[at, token] - entry.logprob) < 1e-4 for token, entry in (entries or {}).items()), path
