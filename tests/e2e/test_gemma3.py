"""A real model with windows in most layers, Gemma 3 270M from a GGUF file, against transformers' own reading of the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanoengine import LLM, SamplingParams
from nanoengine.models.fetch import DOWNLOADS
from nanoengine.models.names import DEMO
from tests.e2e.questions import QUESTIONS
from tests.support import fill_kv_with_nan, forced_logits, reference_choices

FILE = DOWNLOADS["gemma-3-270m"].path
LENGTH, EVERY = 3000, 50
"""Tokens of a text that is several times as long as the window of 512; of how many one is looked at, with its 262,144 logits."""

pytestmark = pytest.mark.skipif(
    not FILE.is_file(), reason="Gemma 3 270M is not here: `nanoengine fetch gemma-3-270m` gets it (253 MB)"
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options: dict[str, Any] = {
        "dtype": "float32",
        "activation_dtype": "float32",
        "device": "cpu",
        "max_model_len": 4096,
    }
    with LLM("gemma-3-270m", use_tqdm=False, num_kv_blocks=2000, **options) as llm:
        fill_kv_with_nan(llm)
        yield llm


@pytest.fixture(scope="module")
def oracle() -> Any:
    """The same file, dequantized by transformers."""
    return AutoModelForCausalLM.from_pretrained(FILE.parent, gguf_file=FILE.name, dtype=torch.float32).eval()


def test_logits_over_a_long_text_are_those_of_transformers(llm: LLM, oracle: Any) -> None:
    tokens = llm.tokenizer.encode((DEMO / "LICENSE-PSF.txt").read_text())[:LENGTH]
    assert len(tokens) == LENGTH
    logits = forced_logits(llm, tokens, num_prompt_tokens=LENGTH - 8, chunk=700, every=EVERY)
    with torch.inference_mode():
        right = oracle(torch.tensor([tokens]), logits_to_keep=torch.arange(0, LENGTH, EVERY)).logits[0]
    assert len(logits) == LENGTH // EVERY
    torch.testing.assert_close(logits, right, rtol=0, atol=1e-3)


def test_twenty_continuations_are_those_of_transformers(llm: LLM, oracle: Any) -> None:
    prompts = [f"Question: {question}\nAnswer:" for question in QUESTIONS[:20]]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        tokens = output.outputs[0].token_ids
        assert tokens == reference_choices(oracle, output.prompt_token_ids, tokens)
    assert "Paris" in outputs[0].outputs[0].text
