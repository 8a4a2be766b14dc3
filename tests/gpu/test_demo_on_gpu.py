"""The bundled model on a GPU in float32, its weights quantized too: its greedy tokens are torch's on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanoengine import LLM, RequestOutput, SamplingParams
from nanoengine.errors import InvalidConfig
from nanoengine.kernels.triton.launch import float8_unsupported_reason
from tests.gpu.marks import needs_gpu

PROMPTS = ["To be, or not to be", "def main(", "The", "import os\n\nclass Reader:\n", "A list of numbers: 1, 2, 3,"]
ON_GPU = {"device": "cuda", "kernels": "triton", "attention_backend": "triton"}
CLEAR = 1e-3
"""Least difference of the best two log probabilities at which no rounding decides."""


def greedy(logprobs: int | None = None, **options: Any) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=logprobs)
    with LLM("demo", dtype="float32", max_model_len=128, num_kv_blocks=64, use_tqdm=False, **options) as llm:
        return llm.generate(PROMPTS, params, use_tqdm=False)


def clear_tokens(output: RequestOutput) -> list[int]:
    """Those before the first that hangs on a thread."""
    found: list[int] = []
    [completion] = output.outputs
    assert completion.logprobs is not None
    for token, candidates in zip(completion.token_ids, completion.logprobs, strict=True):
        best = sorted((entry.logprob for entry in candidates.values()), reverse=True)
        if best[0] - best[1] < CLEAR:
            break
        found.append(token)
    return found


@pytest.mark.parametrize(
    ("options", "quantization"),
    [
        pytest.param({"device": "cpu"}, None, id="cpu"),
        *(pytest.param(ON_GPU, own, marks=needs_gpu, id=f"cuda, {own}") for own in (None, "int8", "int4", "int4-128")),
    ],
)
def test_greedy_tokens_are_those_of_torch(options: dict[str, str], quantization: str | None) -> None:
    stored = {"quantization": quantization, "activation_dtype": "float32"} if quantization else {}
    exact = [clear_tokens(output) for output in greedy(2, device="cpu", kernels="torch", **stored)]
    clear = 10 if quantization else 20
    assert sum(map(len, exact)) > clear * len(PROMPTS), "hardly any token is a close call"
    found = [output.outputs[0].token_ids for output in greedy(**options, **stored)]
    assert [tokens[: len(clear)] for tokens, clear in zip(found, exact, strict=True)] == exact


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none")
def test_floats_of_8_bits_stay_near_the_model_or_say_why_they_cannot() -> None:
    if float8_unsupported_reason(torch.device("cuda")) is not None:
        with pytest.raises(InvalidConfig, match="int8"):
            greedy(**ON_GPU, quantization="fp8")
        return
    first = []
    for options in ({"quantization": "fp8"}, {}):
        logprobs = [output.outputs[0].logprobs for output in greedy(1, **ON_GPU, **options)]
        first.append([max(entry.logprob for entry in found[0].values()) for found in logprobs if found])
    assert first[0] != first[1], "the weights are rounded"
    torch.testing.assert_close(torch.tensor(first[0]), torch.tensor(first[1]), atol=0.5, rtol=0.0)
