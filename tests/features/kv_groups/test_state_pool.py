"""States in a real engine: what a request gets does not depend on how it is run, to the bit, from slots full of NaN."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.errors import InvalidConfig
from nanoengine.kernels.native.support import unsupported_reason
from tests.features.kv_groups.states import saying, snapshots_of
from tests.features.speculation.scripted import Scripted, erring
from tests.models.families import engine, family_checkpoint

REASON = unsupported_reason(torch.device("cpu"), torch.float32)
SHAPES = ("LFM2", "Qwen3.5", "Granite 4")


def ask(llm: LLM, prompts: list[list[int]], max_tokens: int = 30) -> list[tuple[list[int], list[float]]]:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [
        (own.token_ids, [entry[token].logprob for token, entry in zip(own.token_ids, own.logprobs or [], strict=True)])
        for own in outputs
    ]


@pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")
@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_request_gets_does_not_depend_on_the_way(tmp_path: Path, shape: str) -> None:
    folder = family_checkpoint(tmp_path, shape, head_dim=32)
    rng = random.Random(0)
    shared = [rng.randrange(250) for _ in range(70)]
    prompts = [
        shared[: rng.choice([0, 40, 70])] + [rng.randrange(250) for _ in range(rng.randint(1, 60))] for _ in range(8)
    ]
    with engine(folder, max_num_seqs=1, enable_prefix_caching=False, enforce_eager=True) as llm:
        right = [ask(llm, [prompt])[0] for prompt in prompts]
    ways: list[dict[str, Any]] = [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3, "scheduling_policy": "mixed"},
        {"num_kv_blocks": 33, "async_scheduling": True},
        {"snapshot_memory": 0, "long_prefill_token_threshold": 5},
        {"num_kv_blocks": 40, "speculation": "ngram", "num_drafts": 5},
    ]
    accepted = rejected = preempted = restored = 0
    for way in ways:
        with engine(folder, **{"max_model_len": 400} | way) as llm:
            if "speculation" in way:
                speculation = llm.built.capabilities["speculation"].speculation
                speculation.proposer = Scripted(erring(0.3)(saying(prompts, right)))
            for _ in range(2):
                assert ask(llm, prompts) == right, way
            preempted += llm.metrics.num_preemptions
            restored += snapshots_of(llm).num_restored
            if (stats := llm.metrics.speculation) is not None:
                accepted, rejected = stats.num_accepted, stats.num_drafts - stats.num_accepted
    assert preempted
    assert restored
    assert accepted
    assert rejected


@pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")
def test_a_conversation_goes_on_behind_an_answer_whose_last_tokens_were_drafts(tmp_path: Path) -> None:
    """A block ended inside a run of accepted drafts: its state is kept. The last run has filled a block, whose state is not."""
    folder, prompt = family_checkpoint(tmp_path, "Qwen3.5"), list(range(100, 117))
    with engine(folder, max_num_seqs=1, enable_prefix_caching=False) as llm:
        [(tokens, _)] = right = ask(llm, [prompt], max_tokens=32)
        turn = [*prompt, *tokens, 7, 8, 9]
        then = ask(llm, [turn])
    with engine(folder, speculation="ngram", num_drafts=7) as llm:
        speculation = llm.built.capabilities["speculation"].speculation
        speculation.proposer = Scripted(saying([prompt], right))
        assert ask(llm, [prompt], max_tokens=32) == right
        assert llm.metrics.speculation.num_accepted > 20
        cached = llm.metrics.cache.num_hit_tokens
        assert ask(llm, [turn]) == then
        assert llm.metrics.cache.num_hit_tokens - cached == 32


def test_snapshots_take_no_more_than_their_memory(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, "LFM2")
    size = 4 * 3 * 2 * 48  # of a state: 3 layers, 2 inputs of 48 channels
    for memory, count in ((10 * size, 10), (10 * size - 1, 9), (2**30, 100)):  # no more than blocks
        with engine(folder, snapshot_memory=memory) as llm:
            assert snapshots_of(llm).num_slots == count


def test_options_have_bounds(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, "LFM2")
    with pytest.raises(InvalidConfig, match="snapshot_memory"):
        engine(folder, snapshot_memory=-1)
