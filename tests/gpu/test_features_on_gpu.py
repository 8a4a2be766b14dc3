"""What only some requests or options ask for, as on the CPU: drafts, K/V in host memory, and no limit of length."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.modes import running_in
from nanoengine import LLM, SamplingParams
from tests.features.speculation.scripted import Scripted
from tests.gpu.engines import MODEL, TINY_POOL, VOCAB_SIZE, Tokens, every_mode, generate, open_llm, requests
from tests.gpu.marks import needs_gpu
from tests.support import tiny_checkpoint

HOST_MEMORY = 64 << 20
DEVICES = [
    pytest.param({"device": "cpu", "kernels": "torch"}, id="cpu"),
    pytest.param({"device": "cuda"}, marks=needs_gpu, id="cuda"),
]


@pytest.mark.parametrize("device", DEVICES)
def test_guessed_ahead(checkpoint: Path, expected: Tokens, device: dict[str, Any]) -> None:
    """By somebody who knows the texts, but says something else now and then."""
    prompts, _ = requests()
    texts = [[*prompt, *own] for prompt, texts in zip(prompts, expected, strict=True) for own in texts]

    def say(token_ids: Seq[int], most: int) -> list[int]:
        start, known = len(token_ids), list(token_ids)
        guess = next((text[start : start + most] for text in texts if text[:start] == known), [])
        return guess if start % 3 else [*guess[:2], 0]

    with open_llm(checkpoint, **device, speculation="ngram", num_drafts=6) as llm:
        speculation = llm.built.capabilities["speculation"].speculation
        assert speculation is not None
        speculation.proposer = Scripted(say)
        for mode in every_mode(llm):
            llm.reset_prefix_cache()
            before = deepcopy(speculation.stats)
            with running_in(llm, mode):
                assert generate(llm, *requests()) == expected, mode
            after = speculation.stats
            assert after.num_drafts - before.num_drafts > after.num_accepted - before.num_accepted > 50


@pytest.mark.parametrize("device", DEVICES)
def test_swapped_out_and_back(checkpoint: Path, expected: Tokens, device: dict[str, Any]) -> None:
    """And found again in host memory: the pool is too small to keep them, the host is not."""
    options = {"num_kv_blocks": TINY_POOL, "preemption_mode": "swap", "kv_host_memory": HOST_MEMORY}
    with open_llm(checkpoint, **device, **options) as llm:
        for mode in every_mode(llm):
            llm.reset_prefix_cache()
            before = llm.engine.scheduler.num_preemptions
            with running_in(llm, mode):
                assert generate(llm, *requests()) == expected, mode
            assert llm.engine.scheduler.num_preemptions > before
        assert generate(llm, *requests()) == expected
        assert llm.metrics.offload.num_loaded_blocks > 0


@pytest.mark.parametrize("device", DEVICES[1:])
def test_lengths_that_nobody_has_limited(tmp_path: Path, device: dict[str, Any]) -> None:
    """max_model_len is the model's own: tables are as wide as that, and sequences may be cut into many parts."""
    checkpoint = tiny_checkpoint(tmp_path, **MODEL | {"max_position_embeddings": 40_960})
    prompts, params = requests(6, seed=4)
    prompts.append([(7 * i + i // 11) % VOCAB_SIZE for i in range(2500)])
    params.append(SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8))
    options: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 2600, "max_num_seqs": 16, "use_tqdm": False}
    with LLM(str(checkpoint), device="cpu", kernels="torch", **options) as llm:
        exact = generate(llm, prompts, params)
    with LLM(str(checkpoint), **options | device) as llm:
        assert llm.engine.max_model_len == 40_960
        for mode in every_mode(llm):
            llm.reset_prefix_cache()
            with running_in(llm, mode):
                assert generate(llm, prompts, params) == exact, mode
