"""The capability in the core's start-up, with the bundled model: log probabilities of prompts, and masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine.core.config import EngineConfig
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.startup import Startup
from nanoengine.sampling.capability import Sampling
from nanoengine.sampling.params import SamplingParams

DEMO = Path(__file__).parents[2] / "nanoengine" / "demo"
PROMPT = "def binary_search(items, target):\n    low, high = 0, len(items) - 1\n" * 6


def make(**options: Any) -> tuple[LLMEngine, Sampling]:
    sampling = Sampling()
    config = EngineConfig.from_options(str(DEMO), {"dtype": "float32", "max_model_len": 400} | options)
    return Startup(config, [sampling]).build(), sampling


@pytest.mark.parametrize("options", [{}, {"long_prefill_token_threshold": 7, "async_scheduling": True}], ids=str)
def test_prompt_logprobs_are_those_of_transformers_in_chunks_too(options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    engine, _ = make(**options)
    request = engine.make_request(PROMPT, SamplingParams(prompt_logprobs=3, logprobs=2, max_tokens=4, temperature=0))
    beside = engine.make_request("class Tree:", SamplingParams(prompt_logprobs=0, max_tokens=9))
    for own in (request, beside):
        engine.submit(own)
    while engine.has_unfinished:
        engine.step()
    [seq], ids = request.sequences, request.prompt_token_ids
    reference = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([seq.token_ids])).logits[0].log_softmax(-1)
    found = [*(request.output().prompt_logprobs or ())[1:], *(seq.logprobs or ())]
    assert len(found) == len(ids) - 1 + 4
    for row, token, entry in zip(expected, seq.token_ids[1:], found, strict=False):
        assert next(iter(entry)) == token
        for other, own in entry.items():
            assert own.logprob == pytest.approx(float(row[other]), abs=2e-4)
    others = beside.output().prompt_logprobs
    assert others is not None
    assert [len(entry) for entry in others[1:]] == [1] * (len(beside.prompt_token_ids) - 1)
    engine.close()
