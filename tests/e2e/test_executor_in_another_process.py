"""A model runner in another process, which knows nothing but the bytes of plans, computes what one in this process does."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import RequestOutput, SamplingParams
from nanoengine.builder import Built, build_engine, read_config
from nanoengine.core.messages import StepPlan, StepResult
from nanoengine.core.model_runner import ModelRunner
from tests.core.toys import check
from tests.support import fill_with_nan

POISON = 222
"""A token at which the model over there raises."""

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


class Remote:
    """An executor that sends plans, and takes results in their order."""

    def __init__(self, pipe: Connection):
        self.pipe, self.sizes = pipe, list[int]()

    def launch(self, plan: StepPlan) -> Remote:
        message = pickle.dumps(plan)
        self.sizes.append(len(message))
        self.pipe.send_bytes(message)
        return self

    def result(self) -> StepResult:
        outcome = pickle.loads(self.pipe.recv_bytes())
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, StepResult)
        return outcome

    def close(self) -> None:
        """The runner over there goes with the next one."""


def serve(pipe: Connection) -> None:
    """The other side: a runner for each config, with a pool of NaN, whose model raises at POISON."""
    runner: ModelRunner | None = None
    while (message := pickle.loads(pipe.recv_bytes())) is not None:
        outcome: Any = None
        if isinstance(message, StepPlan):
            assert runner is not None
            try:
                outcome = runner.launch(message).result()
            except Exception as error:
                outcome = RuntimeError(str(error))
        else:
            found = build_engine(read_config(*message), use_tqdm=False).engine.executor
            assert isinstance(found, ModelRunner)
            runner = poisoned(found)
        pipe.send_bytes(pickle.dumps(outcome))


def poisoned(runner: ModelRunner) -> ModelRunner:
    fill_with_nan(runner)
    forward = runner.model.forward

    def raising(input_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        hidden = forward(input_ids, *rest)  # its K/V are written by now
        if POISON in input_ids.tolist():
            raise RuntimeError("poisoned")
        return hidden

    runner.model.forward = raising  # type: ignore[method-assign]
    return runner


@pytest.fixture(scope="module")
def pipe() -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()
    yield here
    here.send_bytes(pickle.dumps(None))
    process.join(30)
    assert process.exitcode == 0


def build(tiny: Path, pipe: Connection | None = None, **options: Any) -> Built:
    """An engine; with a pipe its runner is over there."""
    sizes = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_kv_blocks": 150, "max_model_len": 56}
    asked = str(tiny), sizes | {"max_num_seqs": 12, "max_num_batched_tokens": 64, "num_threads": 1} | options
    built = build_engine(read_config(*asked), use_tqdm=False)
    if pipe is not None:
        pipe.send_bytes(pickle.dumps(asked))
        pipe.recv_bytes()
        built.engine.executor.close()
        built.engine.executor = Remote(pipe)
    return built


def run(built: Built, params: list[SamplingParams]) -> list[RequestOutput]:
    engine = built.engine
    requests = [engine.make_request(prompt, own) for prompt, own in zip(PROMPTS, params, strict=True)]
    for request in requests:
        engine.submit(request)
    while engine.has_unfinished:
        engine.step()
        check(engine.scheduler)
    return [replace(request.output(), metrics=None) for request in requests]


def said(outputs: list[RequestOutput]) -> list[Any]:
    """All but how much was cached, and the values of log probabilities."""
    return [
        [(own.token_ids, own.text, own.finish_reason, shown(own.logprobs)) for own in output.outputs]
        + [shown(output.prompt_logprobs)]
        for output in outputs
    ]


def shown(logprobs: Any) -> Any:
    return None if logprobs is None else [entry and sorted(entry) for entry in logprobs]


@pytest.fixture(scope="module")
def right(tiny: Path) -> list[Any]:
    return said(run(build(tiny), PARAMS))


WAYS: list[dict[str, Any]] = [
    {},
    {"num_kv_blocks": 18, "max_num_batched_tokens": 16, "scheduling_policy": "mixed", "async_scheduling": True},
    {"num_kv_blocks": 18, "preemption_mode": "swap", "kv_host_memory": 1 << 20, "max_num_seqs": 4},
    {"speculation": "ngram", "async_scheduling": True, "enable_prefix_caching": False},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_what_is_said_is_what_an_engine_in_this_process_says(
    tiny: Path, pipe: Connection, right: list[Any], options: dict[str, Any]
) -> None:
    built = build(tiny, pipe, **options)
    for _ in range(2):  # the second time with what the first has left in the cache
        assert said(run(built, PARAMS)) == right
    metrics = built.metrics.snapshot(built.engine)
    assert metrics.num_preemptions > 0 or "num_kv_blocks" not in options
    assert metrics.offload is None or metrics.offload.num_loaded_blocks > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_over_there_ends_its_requests_and_the_others_go_on(
    tiny: Path, pipe: Connection, overlap: bool
) -> None:
    """POISON is sampled: a step that decodes fails."""
    greedy = SamplingParams(temperature=0.0, **COMMON)
    expected = said(run(build(tiny), [greedy] * 9))
    built = build(tiny, pipe, async_scheduling=overlap, max_num_seqs=4)
    bad = replace(greedy, logit_bias={POISON: 100.0})
    outputs = run(built, [*[greedy] * 4, bad, *[greedy] * 4])
    assert outputs[4].outputs[0].finish_reason == "error"
    found = said(outputs)
    sound = [i for i in range(9) if outputs[i].outputs[0].finish_reason != "error"]
    assert len(sound) >= 5
    assert [found[i] for i in sound] == [expected[i] for i in sound]
    assert said(run(built, [greedy] * 9)) == expected


def test_a_step_that_only_decodes_takes_few_bytes(tiny: Path, pipe: Connection) -> None:
    """Nothing in it grows with what there was before."""
    built = build(tiny, pipe)
    engine, remote = built.engine, built.engine.executor
    assert isinstance(remote, Remote)
    for i in range(8):
        params = SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True)
        engine.submit(engine.make_request(list(range(i, i + 8)), params))
    while engine.has_unfinished:
        engine.step()
    first, *decodes = remote.sizes
    assert len(decodes) == 16
    assert max(decodes) < min(1500, first)
    assert sum(decodes) / 16 < 1.5 * decodes[1]
