"""Prompts that are computed alone are replayed from recordings, filled up with padding, whatever of them is in the cache."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanoengine import LLM, SamplingParams
from nanoengine.engine.kv.block_pool import NULL_BLOCK
from nanoengine.runner import startup
from nanoengine.runner.graphs import RecordedSteps, bucket_for, prompt_sizes
from tests.e2e.small_engine import late_device
from tests.support import fill_kv_with_nan, model_runner

GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
SIZES = [4, 8]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(11 * i + 5 * seed) % 250 for i in range(length)]


@contextmanager
def recording(folder: Path, **options: Any) -> Iterator[LLM]:
    """An engine on a late device, that records prompts of `SIZES` tokens."""
    common = {"kernels": "triton", "attention_backend": "triton", "num_kv_blocks": 40, "max_num_seqs": 2}
    common |= {"device": "cpu", "dtype": "float32", "max_model_len": 64, "use_tqdm": False}
    with pytest.MonkeyPatch.context() as patch, late_device(can_record=True):
        patch.setattr(startup, "prompt_sizes", lambda *_: SIZES)
        with LLM(str(folder), **common | options) as llm:
            yield llm


@pytest.fixture(scope="module")
def recorded(tiny: Path) -> Iterator[LLM]:
    with recording(tiny, max_num_batched_tokens=10) as llm:
        yield llm


@pytest.fixture
def llm(recorded: LLM) -> LLM:
    """One engine for all tests: in Triton's interpreter a recording takes its time."""
    recorded.reset_prefix_cache()
    fill_kv_with_nan(recorded)
    return recorded


@pytest.fixture(scope="module")
def right(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), device="cpu", dtype="float32", num_kv_blocks=40, use_tqdm=False) as llm:
        yield llm


def tokens(llm: LLM, *prompts: list[int], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params, use_tqdm=False)]


def watch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """{tokens of a prompt's recording: how often it is replayed from now on}."""
    graphs, seen = model_runner(llm).graphs, Counter[int]()
    assert graphs is not None
    prompts, replay = graphs.prompts, RecordedSteps.replay

    def watched(steps: RecordedSteps, size: int) -> torch.Tensor:
        seen.update([size] * (steps is prompts))
        return replay(steps, size)

    monkeypatch.setattr(RecordedSteps, "replay", watched)
    return seen


def test_every_length_runs_in_the_smallest_recording_that_holds_it(
    llm: LLM, right: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(llm, monkeypatch)
    for length, size in ((1, 4), (4, 4), (5, 8), (8, 8), (9, None)):
        seen.clear()
        assert tokens(llm, prompt(length, seed=length)) == tokens(right, prompt(length, seed=length))
        assert seen == ({size: 1} if size else {})
    kv_cache = model_runner(llm).kv_cache
    assert kv_cache is not None
    assert all(cache[NULL_BLOCK].isnan().all() for layer in kv_cache.layers for cache in layer), "of padding nothing"


def test_what_is_behind_a_cached_prefix_and_chunks_are_replayed_too(
    llm: LLM, right: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(llm, monkeypatch)
    assert tokens(llm, prompt(18)) == tokens(right, prompt(18))
    assert seen == {8: 1}, "chunks of 10 and 8 tokens"
    longer = [*prompt(16), 1, 2, 3]
    assert tokens(llm, longer) == tokens(right, longer)
    assert seen == {8: 1, 4: 1}, "a block was there"


def test_drawn_tokens_and_log_probabilities_are_those_of_an_unrecorded_step(
    llm: LLM, right: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.9, seed=3, top_k=20, logprobs=2, presence_penalty=1.0, max_tokens=2)
    seen = watch(llm, monkeypatch)
    found, expected = (engine.generate(prompt(7), params, use_tqdm=False)[0].outputs[0] for engine in (llm, right))
    assert seen == {8: 1}
    assert found.token_ids == expected.token_ids
    for mine, theirs in zip(found.logprobs or [], expected.logprobs or [], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4) for token in mine)


def test_two_prompts_forks_and_log_probabilities_of_prompts_are_not_recorded_steps(
    llm: LLM, right: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(llm, monkeypatch)
    pair = prompt(5, seed=1), prompt(3, seed=2)
    assert tokens(llm, *pair) == tokens(right, *pair)
    forked = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=2, ignore_eos=True)
    assert tokens(llm, prompt(6, seed=3), params=forked) == tokens(right, prompt(6, seed=3), params=forked)
    asking = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    assert tokens(llm, prompt(6, seed=4), params=asking) == tokens(right, prompt(6, seed=4), params=asking)
    assert seen == {}


def test_nothing_is_recorded_where_it_is_not_asked_for(tiny: Path) -> None:
    with recording(tiny, enforce_eager=True) as llm:
        assert model_runner(llm).graphs is None


def test_little_of_a_longer_step_is_padding() -> None:
    sizes = prompt_sizes(8192, 40_960)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (128, 2048)
    for length in range(129, 2049):
        size = bucket_for(length, sizes)
        assert size is not None
        assert size - length < size / 3
    assert prompt_sizes(600, 40_960) == [128, 192, 256, 384, 512]
    assert prompt_sizes(100, 40_960) == []
    assert prompt_sizes(8192, 200) == [128, 192, 256], "none that no sequence can fill"
