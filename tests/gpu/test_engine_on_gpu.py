"""The engine on an NVIDIA GPU: exact in float32, sound in bfloat16, sized from the memory that is free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nanoengine import LLM, SamplingParams
from tests.support import (
    fill_kv_with_nan,
    forced_logits,
    model_runner,
    reference_logits,
    reference_model,
    tiny_checkpoint,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("gpu"), num_hidden_layers=3, head_dim=64, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), dtype="float32", device="cuda", kv_cache_memory=64 << 20, use_tqdm=False) as llm:
        yield llm


def test_logits_are_those_of_transformers(llm: LLM, checkpoint: Path) -> None:
    token_ids = torch.randint(0, 256, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = reference_logits(reference_model(checkpoint), token_ids)
    fill_kv_with_nan(llm)
    for chunk in (300, 33):
        logits = forced_logits(llm, token_ids, num_prompt_tokens=200, chunk=chunk)
        torch.testing.assert_close(logits.cpu(), expected, atol=1e-4, rtol=0)


def test_tokens_are_those_of_the_cpu(llm: LLM, checkpoint: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 256, (3 + 11 * i,), generator=generator).tolist() for i in range(12)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), top_p=0.95, seed=i, max_tokens=30, ignore_eos=True) for i in range(12)
    ]
    on_gpu = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(str(checkpoint), dtype="float32", device="cpu", num_kv_blocks=200, use_tqdm=False) as other:
        on_cpu = [output.outputs[0].token_ids for output in other.generate(prompts, params, use_tqdm=False)]
    assert on_gpu == on_cpu


def test_half_precision_runs_with_a_pool_from_free_memory(checkpoint: Path) -> None:
    free, total = torch.cuda.mem_get_info()
    for dtype in ("bfloat16", "float16"):
        with LLM(str(checkpoint), dtype=dtype, gpu_memory_utilization=0.5, max_num_seqs=8, use_tqdm=False) as llm:
            assert model_runner(llm).device.type == "cuda"
            outputs = llm.generate(["a", "bc"], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
            assert all(len(output.outputs[0].token_ids) == 20 for output in outputs)
            assert total - torch.cuda.mem_get_info()[0] <= 0.5 * total
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free - (1 << 30), "closing gives the memory back"
