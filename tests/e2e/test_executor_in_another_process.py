"""An executor that has nothing but the bytes of plans computes the tokens that one in this process does.

One process serves all engines of this file, one after the other: each has its own scheduler, pool size, policy and depth, and
finds the rows and K/V that those before it have left.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM, BeamSearchParams, SamplingParams
from nanoengine.builder import build_engine
from nanoengine.config import EngineConfig
from nanoengine.engine.executor import ExecutorInfo
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.messages import StepPlan
from nanoengine.engine.request import Request
from tests.e2e.other_process import POISON, RemoteExecutor, RemoteStep
from tests.e2e.small_engine import open_llm

BLOCK = 4
MOST_BLOCKS = 150
MOST_TOKENS = 64
MOST_SEQS = 12
MAX_LEN = 56

SHARED = [(3 * i + 1) % 200 for i in range(14)]
PROMPTS = [
    (SHARED if i % 3 == 0 else []) + [(37 * i + 11 * j) % 200 for j in range(1 + (7 * i) % 23)] for i in range(9)
]
COMMON: dict[str, Any] = {"max_tokens": 7, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0.0, **COMMON),
    SamplingParams(temperature=0.9, seed=1, n=3, **COMMON),
    SamplingParams(temperature=0.8, seed=2, top_k=20, logprobs=2, repetition_penalty=1.4, **COMMON),
    SamplingParams(temperature=0.0, prompt_logprobs=1, presence_penalty=1.0, frequency_penalty=0.5, **COMMON),
    SamplingParams(temperature=0.7, seed=4, n=2, bad_words=["a", "b c"], logit_bias={5: 2.0}, **COMMON),
    SamplingParams(temperature=1.1, seed=5, min_p=0.02, allowed_token_ids=range(120), **COMMON),
    SamplingParams(temperature=0.0, max_tokens=12, min_tokens=4, stop_token_ids=list(range(0, 200, 7))),
    SamplingParams(temperature=0.8, seed=7, n=2, best_of=3, top_p=0.9, **COMMON),
    SamplingParams(temperature=0.0, n=2, logprobs=0, **COMMON),
]
BEAMS = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.5)


@dataclass
class Borrowed:
    """The executor, for one engine of several."""

    executor: RemoteExecutor
    info: ExecutorInfo

    def launch(self, plan: StepPlan) -> RemoteStep:
        return self.executor.launch(plan)

    def close(self) -> None:
        """It is given back as it is."""


@dataclass
class Engines:
    """Makes engines over the one executor."""

    executor: RemoteExecutor
    folder: Path

    def open(self, *, blocks: int = MOST_BLOCKS, host_blocks: int = 0, depth: int = 1, **options: Any) -> LLMEngine:
        config = replace(config_of(self.folder), **options)
        info = replace(
            self.executor.info,
            num_blocks=blocks,
            num_host_blocks=host_blocks,
            num_rows=min(config.max_num_seqs, config.max_num_batched_tokens),
            max_steps_in_flight=depth,
        )
        return build_engine(config, False, lambda *_: Borrowed(self.executor, info)).engine


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        block_size=BLOCK,
        num_kv_blocks=MOST_BLOCKS,
        max_model_len=MAX_LEN,
        max_num_seqs=MOST_SEQS,
        max_num_batched_tokens=MOST_TOKENS,
    )


@pytest.fixture(scope="module")
def engines(tiny: Path) -> Iterator[Engines]:
    config = replace(config_of(tiny), preemption_mode="swap", kv_host_memory=1 << 20)
    executors: list[RemoteExecutor] = []

    def start(*arguments: Any) -> RemoteExecutor:
        executors.append(RemoteExecutor(*arguments))
        return executors[0]

    engine = build_engine(config, False, start).engine
    assert executors[0].info.num_host_blocks > 20
    yield Engines(executors[0], tiny)
    engine.close()
    assert not executors[0].process.is_alive()


@pytest.fixture(scope="module")
def here(tiny: Path) -> Iterator[LLM]:
    """An engine in this process, with room for all."""
    with open_llm(tiny, max_model_len=MAX_LEN, num_kv_blocks=200) as llm:
        yield llm


@pytest.fixture(scope="module")
def right(here: LLM) -> list[list[list[int]]]:
    outputs = here.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def run(engine: LLMEngine, requests: list[Request]) -> list[list[list[int]]]:
    for request in requests:
        engine.submit(request)
    finish(engine)
    assert all(request.error is None for request in requests)
    return [tokens_of(request) for request in requests]


def finish(engine: LLMEngine) -> None:
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    assert engine.scheduler.num_in_flight == 0
    assert engine.scheduler.block_manager.pool.usage == 0


def tokens_of(request: Request) -> list[list[int]]:
    return [completion.token_ids for completion in request.output().outputs]


def make(engine: LLMEngine) -> list[Request]:
    return [engine.make_request(prompt, own) for prompt, own in zip(PROMPTS, PARAMS, strict=True)]


def drawn(seed: int) -> dict[str, Any]:
    """How an engine is set up. Every second one has a pool that is too small for all, every second of those swaps."""
    rng = random.Random(seed)
    is_small, swaps = seed % 2 == 0, seed % 4 == 0
    return {
        "scheduling_policy": rng.choice(["prefill_first", "mixed"]),
        "max_num_batched_tokens": rng.choice([5, 16, MOST_TOKENS]),
        "long_prefill_token_threshold": rng.choice([None, 3]),
        "max_num_seqs": rng.choice([4, MOST_SEQS]),
        "depth": rng.choice([1, 2, 3]),
        "blocks": 18 if is_small else MOST_BLOCKS,
        "host_blocks": rng.choice([6, 20]) if swaps else 0,
        "preemption_mode": "swap" if swaps else "recompute",
        "kv_host_memory": 1 << 20 if swaps else None,
        "enable_prefix_caching": swaps or rng.random() < 0.7,
    }


@pytest.mark.parametrize("seed", range(16))
def test_tokens_are_those_of_an_engine_in_this_process(
    engines: Engines, right: list[list[list[int]]], seed: int
) -> None:
    options = drawn(seed)
    engine = engines.open(**options)
    assert run(engine, make(engine)) == right
    assert run(engine, make(engine)[::-1]) == right[::-1], "with what the first time has left in the cache"
    metrics = engine.metrics()
    assert metrics.num_preemptions > 0 or options["blocks"] == MOST_BLOCKS
    assert (metrics.num_swaps > 0) == (options["preemption_mode"] == "swap")
    assert (metrics.cache.num_loaded_blocks > 0) <= (options["preemption_mode"] == "swap")
    assert (metrics.cache.num_hit_tokens > 0) == options["enable_prefix_caching"]


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_aborts_in_the_middle_leave_the_others_alone(
    engines: Engines, right: list[list[list[int]]], depth: int, policy: str
) -> None:
    engine = engines.open(depth=depth, blocks=30, scheduling_policy=policy)
    for abort_after in (1, 3, 6):
        requests = make(engine)[:7]
        for request in requests:
            engine.submit(request)
        for _ in range(abort_after):
            engine.step()
        for request in requests[::3]:
            engine.abort(request.request_id)
        finish(engine)
        for i, request in enumerate(requests):
            for completion, tokens in zip(request.output().outputs, right[i], strict=True):
                is_aborted = completion.finish_reason == "abort"
                assert i % 3 == 0 or not is_aborted
                assert completion.token_ids == (tokens[: len(completion.token_ids)] if is_aborted else tokens)


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_that_fails_over_there_ends_its_requests_and_no_others(
    engines: Engines, here: LLM, depth: int, policy: str
) -> None:
    """Poison in a prompt, and poison that is sampled: then a step that decodes fails."""
    greedy = SamplingParams(temperature=0.0, **COMMON)
    expected = [output.outputs[0].token_ids for output in here.generate(PROMPTS, greedy, use_tqdm=False)]
    engine = engines.open(depth=depth, scheduling_policy=policy, max_num_seqs=4)
    samples_poison = replace(greedy, logit_bias={POISON: 100.0})
    for _ in range(2):
        first = [engine.add_request(prompt, greedy) for prompt in PROMPTS[:2]]
        while not all(request.finished for request in first):
            engine.step()
        together = [engine.add_request(prompt, greedy) for prompt in PROMPTS[2:4]]
        engine.step()
        bad = [engine.add_request([*SHARED, POISON, 1, 2], greedy)]
        bad.append(engine.add_request([*SHARED, 9], samples_poison))
        later = [engine.add_request(prompt, greedy) for prompt in PROMPTS[4:]]
        finish(engine)
        assert all(str(request.error) == "poisoned" for request in bad)
        for request, tokens in zip([*first, *together, *later], expected, strict=True):
            assert request.error is None or (request not in first and str(request.error) == "poisoned")
            had = tokens_of(request)[0]
            assert had == (tokens if request.error is None else tokens[: len(had)])
        assert sum(request.error is None for request in later) >= 3, "those that waited"
        again = engine.make_request([*SHARED, POISON, 1, 2], greedy)
        engine.submit(again)
        finish(engine)
        assert again.completions[0].seq.num_cached_tokens in (0, len(SHARED) // BLOCK * BLOCK)
        assert run(engine, [engine.make_request(prompt, greedy) for prompt in PROMPTS]) == [[own] for own in expected]


@pytest.mark.parametrize("options", [{}, {"blocks": 20}, {"scheduling_policy": "mixed", "depth": 2, "blocks": 30}])
def test_beams_are_those_of_an_engine_in_this_process(engines: Engines, here: LLM, options: dict[str, Any]) -> None:
    prompts = PROMPTS[1::3]
    expected = here.beam_search(prompts, BEAMS, use_tqdm=False)
    engine = engines.open(**options)
    found = run(engine, [engine.make_beam_request(prompt, BEAMS) for prompt in prompts])
    assert found == [[completion.token_ids for completion in output.outputs] for output in expected]


def test_a_step_that_only_decodes_takes_few_bytes(engines: Engines) -> None:
    """Nothing in it grows with what there was before."""
    engine, executor = engines.open(), engines.executor
    for i in range(8):
        engine.add_request(list(range(i, i + 8)), SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True))
    engine.step()
    num_plans, num_bytes = executor.num_plans, executor.num_bytes
    engine.step()
    empty = executor.num_bytes - num_bytes
    finish(engine)
    assert executor.num_plans - num_plans == 16
    assert (executor.num_bytes - num_bytes) / 16 < 1.5 * empty < 1500
