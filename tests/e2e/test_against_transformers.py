"""The engine against Hugging Face transformers on the bundled model: the same tokens, the same logits, in float32."""

from __future__ import annotations

import heapq
import inspect
import statistics
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.models.names import DEMO
from tests.support import fill_kv_with_nan, forced_logits, reference_choices, reference_logits, reference_model

NUM_NEW_TOKENS = 100
PROMPT_LENGTHS = (1, 2, 5, 15, 16, 17, 48, 130, 333, 900)
PROMPTS_PER_LENGTH = 2
FORCED = slice(100, 700)
"""Tokens whose logits are compared."""


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model(DEMO)


@pytest.fixture(scope="module", params=["auto", "torch"])
def llm(request: pytest.FixtureRequest, demo_llm: LLM) -> Iterator[LLM]:
    """As it comes, and with every operation in torch."""
    if request.param == "auto":
        yield demo_llm
        return
    with LLM("demo", dtype="float32", device="cpu", kernels=request.param, num_kv_blocks=600, use_tqdm=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def code_tokens(demo_llm: LLM) -> list[int]:
    """Real text: sources of the standard library."""
    text = "".join(inspect.getsource(module) for module in (heapq, textwrap, statistics))
    return demo_llm.tokenizer.encode(text)


@pytest.fixture(scope="module")
def prompts(code_tokens: list[int]) -> list[list[int]]:
    """Prompts of one length follow each other."""
    stride = (len(code_tokens) - max(PROMPT_LENGTHS)) // PROMPTS_PER_LENGTH
    return [
        code_tokens[i * stride + length : i * stride + 2 * length]
        if length < 400
        else code_tokens[i * stride :][:length]
        for length in PROMPT_LENGTHS
        for i in range(PROMPTS_PER_LENGTH)
    ]


def test_greedy_tokens_are_those_of_transformers(demo_llm: LLM, reference: Any, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    fill_kv_with_nan(demo_llm)
    for prompt, output in zip(prompts, demo_llm.generate(prompts, params, use_tqdm=False), strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == NUM_NEW_TOKENS
        assert tokens == reference_choices(reference, prompt, tokens), f"a prompt of {len(prompt)} tokens"


@pytest.fixture(scope="module")
def expected_logits(reference: Any, code_tokens: list[int]) -> torch.Tensor:
    return reference_logits(reference, code_tokens[FORCED])


@pytest.mark.parametrize("chunk", [1000, 23])
def test_logits_are_those_of_transformers_at_every_position(
    llm: LLM, code_tokens: list[int], expected_logits: torch.Tensor, chunk: int
) -> None:
    fill_kv_with_nan(llm)
    logits = forced_logits(llm, code_tokens[FORCED], num_prompt_tokens=560, chunk=chunk)
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=0)
