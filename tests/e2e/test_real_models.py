"""Real models from GGUF files against transformers' own reading of the files, which it dequantizes: a chat model, and one with
windows in most layers. The chat model is also compared with what it said before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanoengine import LLM, SamplingParams
from nanoengine.models.fetch import DOWNLOADS
from nanoengine.models.names import DEMO
from tests.support import fill_kv_with_nan, forced_logits, reference_choices, reference_logits

GOLDEN = Path(__file__).parent / "smollm2_sentences.json"
GREEDY = SamplingParams(temperature=0, max_tokens=100)
QUESTIONS = [
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "How many days are there in a leap year?",
    "What is photosynthesis?",
    "Name three primary colors.",
    "Write a haiku about the sea.",
    "What is the largest planet in the solar system?",
    "Explain gravity to a child.",
]
LENGTH, EVERY = 3000, 50
"""Tokens of a text that is several times as long as Gemma's window; of how many one is looked at, with its 262,144 logits."""


@contextmanager
def opened(name: str, **options: Any) -> Iterator[LLM]:
    """Exact: rounded activations may choose another word where two are nearly tied."""
    if not DOWNLOADS[name].path.is_file():
        pytest.skip(f"{name} is not here: `nanoengine fetch {name}` gets it")
    options |= {"dtype": "float32", "activation_dtype": "float32", "device": "cpu", "num_kv_blocks": 2000}
    with LLM(name, use_tqdm=False, **options) as llm:
        fill_kv_with_nan(llm)
        yield llm


def oracle(name: str) -> Any:
    file = DOWNLOADS[name].path
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    with opened("smollm2", max_model_len=1024) as llm:
        yield llm


@pytest.fixture(scope="module")
def smollm2_oracle(smollm2: LLM) -> Any:  # noqa: ARG001  # there is one only where the file is
    return oracle("smollm2")


@pytest.fixture(scope="module")
def chats(smollm2: LLM) -> list[Any]:
    return smollm2.chat([[{"role": "user", "content": own}] for own in QUESTIONS], GREEDY, use_tqdm=False)


def test_first_sentences_are_those_of_before(chats: list[Any]) -> None:
    said = [re.split(r"(?<=[.!?])\s", chat.outputs[0].text.strip())[0] for chat in chats]
    assert said == json.loads(GOLDEN.read_text())
    assert "Paris" in said[0]
    assert chats[0].outputs[0].finish_reason == "stop"


def test_eight_chats_are_those_of_transformers(chats: list[Any], smollm2_oracle: Any) -> None:
    num_tokens = 0
    for chat in chats:
        tokens = chat.outputs[0].token_ids
        assert tokens == reference_choices(smollm2_oracle, chat.prompt_token_ids, tokens)
        num_tokens += len(tokens)
    assert num_tokens > 400


def test_logits_over_real_text_are_those_of_transformers(smollm2: LLM, smollm2_oracle: Any) -> None:
    tokens = smollm2.tokenizer.encode((DEMO / "LICENSE-PSF.txt").read_text()[:3000])
    assert len(tokens) > 500
    logits = forced_logits(smollm2, tokens, num_prompt_tokens=len(tokens) - 8, chunk=300)
    torch.testing.assert_close(logits, reference_logits(smollm2_oracle, tokens), rtol=0, atol=1e-3)


def test_a_long_text_and_eight_continuations_by_gemma_3_are_those_of_transformers() -> None:
    with opened("gemma-3-270m", max_model_len=4096) as llm:
        model = oracle("gemma-3-270m")
        tokens = llm.tokenizer.encode((DEMO / "LICENSE-PSF.txt").read_text())[:LENGTH]
        assert len(tokens) == LENGTH
        logits = forced_logits(llm, tokens, num_prompt_tokens=LENGTH - 8, chunk=700, every=EVERY)
        with torch.inference_mode():
            right = model(torch.tensor([tokens]), logits_to_keep=torch.arange(0, LENGTH, EVERY)).logits[0]
        assert len(logits) == LENGTH // EVERY
        torch.testing.assert_close(logits, right, rtol=0, atol=1e-3)
        prompts = [f"Question: {question}\nAnswer:" for question in QUESTIONS]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
        for output in outputs:
            tokens = output.outputs[0].token_ids
            assert tokens == reference_choices(model, output.prompt_token_ids, tokens)
        assert "Paris" in outputs[0].outputs[0].text
