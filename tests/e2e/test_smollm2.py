"""A real chat model from a GGUF file, against transformers' own reading of the file, and against what it said before."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanoengine import LLM, SamplingParams
from nanoengine.models.fetch import DOWNLOADS
from nanoengine.models.names import DEMO
from tests.e2e.questions import QUESTIONS
from tests.support import fill_kv_with_nan, forced_logits, reference_choices, reference_logits

FILE = DOWNLOADS["smollm2"].path
GOLDEN = Path(__file__).parent / "smollm2_sentences.json"
GREEDY = SamplingParams(temperature=0, max_tokens=100)

pytestmark = pytest.mark.skipif(
    not FILE.is_file(), reason="SmolLM2 is not here: `nanoengine fetch smollm2` gets it (98 MB)"
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Exact: rounded activations may choose another word where two are nearly tied."""
    options: dict[str, Any] = {"dtype": "float32", "activation_dtype": "float32", "device": "cpu"}
    with LLM("smollm2", max_model_len=1024, num_kv_blocks=2000, use_tqdm=False, **options) as llm:
        fill_kv_with_nan(llm)
        yield llm


@pytest.fixture(scope="module")
def oracle() -> Any:
    """The same file, dequantized by transformers."""
    return AutoModelForCausalLM.from_pretrained(FILE.parent, gguf_file=FILE.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def chats(llm: LLM) -> list[Any]:
    return llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], GREEDY, use_tqdm=False)


def test_it_knows_the_capital_of_france(chats: list[Any]) -> None:
    assert "Paris" in chats[0].outputs[0].text
    assert chats[0].outputs[0].finish_reason == "stop"


def test_first_sentences_are_those_of_before(chats: list[Any]) -> None:
    said = [re.split(r"(?<=[.!?])\s", chat.outputs[0].text.strip())[0] for chat in chats[:20]]
    assert said == json.loads(GOLDEN.read_text())


def test_fifty_chats_are_those_of_transformers(chats: list[Any], oracle: Any) -> None:
    num_tokens = 0
    for chat in chats:
        tokens = chat.outputs[0].token_ids
        assert tokens == reference_choices(oracle, chat.prompt_token_ids, tokens)
        num_tokens += len(tokens)
    assert num_tokens > 3000


def test_logits_over_real_text_are_those_of_transformers(llm: LLM, oracle: Any) -> None:
    text = (DEMO / "LICENSE-PSF.txt").read_text()[:3000]
    tokens = llm.tokenizer.encode(text)
    assert len(tokens) > 500
    logits = forced_logits(llm, tokens, num_prompt_tokens=len(tokens) - 8, chunk=300)
    torch.testing.assert_close(logits, reference_logits(oracle, tokens), rtol=0, atol=1e-3)
