"""Whatever breaks, and wherever: those whose data it touched end with an error, nobody else notices, and nothing of it is kept.

A table of points x who drives x policies x pools x moments. In each case five requests that share prefixes, fork, and come one
after the other run into one fault. Then the same requests run again, with what the prefix cache has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from nanoengine.engine.interrupts import InterruptGuard
from nanoengine.engine.kv.events import KVEvent
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.pipeline import Pipeline
from nanoengine.engine.request import Request
from nanoengine.engine.scheduler import POLICIES, Scheduler
from nanoengine.engine.sequence import Sequence
from nanoengine.sampling_params import SamplingParams
from tests.engine.engine_toys import Clock, assert_idle, make_engine
from tests.engine.faulty_model import NO_TOKEN, POINTS, FaultyModel
from tests.engine.late_model import LateModel
from tests.engine.toys import add_family, continuation, make_scheduler


class Job(NamedTuple):
    """A request."""

    prompt: list[int]
    num_completions: int
    max_tokens: int
    arrives: int  # before the step of this number


JOBS = (
    Job([1] * 9, 2, 10, 0),
    Job([1] * 8 + [2] * 5, 1, 8, 1),  # hits the blocks of the first, whose plan may be in flight
    Job([3] * 14, 1, 7, 2),
    Job([3] * 12 + [4], 3, 6, 2),  # hits blocks that the same plan computes
    Job([5] * 3, 1, 9, 4),
)
BLOCK_SIZE = 4
DRIVERS = {"engine, 1 step in flight": 1, "engine, 2 steps in flight": 2, "scheduler alone, 3 steps in flight": 3}
POOLS = {"a large pool": 64, "a pool in which some give way": 9}
MOMENTS = range(1, 13)
CASES = list(itertools.product(POINTS, DRIVERS, POLICIES, POOLS, MOMENTS))


def options_of(policy: str, pool: str) -> dict[str, Any]:
    return {"policy": policy, "num_blocks": POOLS[pool], "max_model_len": 28, "budget": 12, "max_chunk": 6}


# ---- who drives


class EngineDriver:
    def __init__(self, model: LateModel, depth: int, options: dict[str, Any]):
        self.engine = make_engine(model, eos=(), max_steps_in_flight=depth, **options)
        self.scheduler = self.engine.scheduler

    def submit(self, job: Job) -> list[Sequence]:
        params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, n=job.num_completions)
        request = self.engine.add_request(job.prompt, params)
        return [completion.seq for completion in request.completions]

    def step(self) -> None:
        self.engine.step()

    def assert_idle(self) -> None:
        assert_idle(self.engine)


class SchedulerDriver:
    """The engine's loop without requests and texts, as deep as one likes."""

    def __init__(self, model: LateModel, depth: int, options: dict[str, Any]):
        self.model, self.depth = model, depth
        self.scheduler: Scheduler = make_scheduler(**options)
        self.pipeline = Pipeline(Clock())
        self.num_seqs = 0

    def submit(self, job: Job) -> list[Sequence]:
        first_id = self.num_seqs
        self.num_seqs += job.num_completions
        return add_family(self.scheduler, job.prompt, job.num_completions, first_id=first_id, max_tokens=job.max_tokens)

    def step(self) -> None:
        guard = InterruptGuard()
        try:
            while len(self.pipeline) < self.depth and (plan := self.scheduler.schedule()):
                self.scheduler.check()
                self.pipeline.launch(self.model, plan, guard)
            if not self.pipeline:
                return
            outcome = self.pipeline.take(guard)
        except KeyboardInterrupt:
            while self.scheduler.num_in_flight:
                self.scheduler.fail()
                self.scheduler.check()
            self.pipeline.clear()
            raise
        if isinstance(outcome.result, Exception):
            self.scheduler.fail()
        else:
            self.scheduler.update(outcome.plan, outcome.result)

    def assert_idle(self) -> None:
        while self.pipeline:  # those that were launched before it was known that all had ended
            self.step()
        self.scheduler.check()
        assert self.scheduler.num_in_flight == 0
        assert self.scheduler.block_manager.pool.usage == 0.0


def run_jobs(driver: EngineDriver | SchedulerDriver) -> tuple[dict[Sequence, Job], int]:
    """Whose each sequence is, and how often it was interrupted."""
    owners: dict[Sequence, Job] = {}
    num_interrupts = 0
    for number in range(400):
        for job in JOBS:
            if job.arrives == number:
                owners.update(dict.fromkeys(driver.submit(job), job))
        if number > 4 and not driver.scheduler.has_unfinished:
            driver.assert_idle()
            return owners, num_interrupts
        try:
            driver.step()
        except KeyboardInterrupt:
            num_interrupts += 1
        driver.scheduler.check()
    raise AssertionError("it does not come to an end")


def assert_right(owners: dict[Sequence, Job]) -> None:
    for seq, job in owners.items():
        tokens = continuation(job.prompt, job.max_tokens)
        if seq.finish_reason == "error":
            assert seq.output_token_ids == tokens[: seq.num_output_tokens], "what it had said stays"
        else:
            assert (seq.finish_reason, seq.output_token_ids) == ("length", tokens)


# ---- a step breaks


@pytest.mark.parametrize(("point", "driver_name", "policy", "pool", "moment"), CASES)
def test_a_fault_ends_those_whose_data_it_touched_and_nobody_else(
    point: str, driver_name: str, policy: str, pool: str, moment: int
) -> None:
    depth = DRIVERS[driver_name]
    model = FaultyModel(point, moment)
    driver = (EngineDriver if driver_name.startswith("engine") else SchedulerDriver)(
        model, depth, options_of(policy, pool)
    )
    model.scheduler = driver.scheduler
    owners, num_interrupts = run_jobs(driver)
    assert model.num_launched >= moment, "it broke"
    assert num_interrupts == point.startswith("Ctrl-C")

    failed = {seq for seq in owners if seq.finish_reason == "error"}
    assert failed >= set(model.touched)
    assert model.touched or point == NO_TOKEN, "a chunk in the middle of a prompt samples no token"
    beginnings = {tuple(seq.token_ids[:BLOCK_SIZE]) for seq in model.touched}
    for seq in failed - set(model.touched):
        assert depth > 1, "with one step in flight nobody can have shared what it was to write"
        assert point != NO_TOKEN, "all the others were told their tokens"
        assert tuple(seq.token_ids[:BLOCK_SIZE]) in beginnings, "it shared what was not written"
    assert_right(owners)

    again, _ = run_jobs(driver)
    assert {seq.finish_reason for seq in again} == {"length"}
    assert_right(again)


def test_the_matrix_is_complete() -> None:
    assert len(CASES) == len(set(CASES)) == 7 * 3 * 2 * 2 * 12 == 1008
    assert len(REQUEST_CASES) == len(set(REQUEST_CASES)) == 4 * 2 * 2 == 16


@pytest.mark.parametrize(("policy", "pool"), list(itertools.product(POLICIES, POOLS)))
def test_the_jobs_are_worth_something(policy: str, pool: str) -> None:
    """Where nothing breaks, they fork, hit, overlap, and in the small pool give way."""
    model = LateModel()
    driver = EngineDriver(model, 2, options_of(policy, pool))
    owners, _ = run_jobs(driver)
    assert_right(owners)
    assert {seq.finish_reason for seq in owners} == {"length"}
    scheduler = driver.scheduler
    assert scheduler.num_forks > 0
    assert scheduler.block_manager.stats.num_hit_tokens > 0
    assert model.num_overlapping > len(model.plans) / 2
    assert (scheduler.num_preemptions > 0) == (POOLS[pool] < 64)


# ---- what belongs to one request breaks


class Broken(Exception):
    pass


def raising_from(call: int, decode: Callable[[Any], str]) -> Callable[[Any], str]:
    """A decoder that breaks at its call of this number."""
    num_calls = itertools.count(1)

    def broken(token_ids: Any) -> str:
        if next(num_calls) >= call:
            raise Broken
        return decode(token_ids)

    return broken


def break_decoder(engine: LLMEngine, request: Request, call: int) -> None:
    detokenizer = request.completions[0].detokenizer
    detokenizer._decode = raising_from(call, engine.tokenizer.decode)


def break_push(engine: LLMEngine, request: Request) -> None:
    """At its third token: each takes two calls."""
    break_decoder(engine, request, 2 * 2 + 1)


def break_finish(engine: LLMEngine, request: Request) -> None:
    break_decoder(engine, request, 2 * MAX_TOKENS + 1)


def break_encode(engine: LLMEngine, request: Request) -> None:  # noqa: ARG001 - it never becomes a request
    def broken(text: str) -> list[int]:
        raise Broken(text)

    sound, engine.tokenizer.encode = engine.tokenizer.encode, broken  # type: ignore[method-assign]
    with pytest.raises(Broken):
        engine.add_request("1 2 3")
    engine.tokenizer.encode = sound  # type: ignore[method-assign]


def break_listener(engine: LLMEngine, request: Request) -> None:  # noqa: ARG001 - it is nobody's
    def broken(event: KVEvent) -> None:
        raise Broken(event)

    engine.listen_to_kv_events(broken)


MAX_TOKENS = 8
REQUEST_POINTS = {break_push: 2, break_finish: MAX_TOKENS, break_encode: None, break_listener: None}
REQUEST_CASES = list(itertools.product(REQUEST_POINTS, (1, 2), POLICIES))


@pytest.mark.parametrize(
    ("break_it", "depth", "policy"),
    REQUEST_CASES,
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_what_belongs_to_one_request_hurts_only_that(
    break_it: Callable[[LLMEngine, Request], None], depth: int, policy: str
) -> None:
    engine = make_engine(LateModel(), eos=(), max_steps_in_flight=depth, policy=policy, max_chunk=6)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    prompts = [[1] * 9, [1] * 9, [1] * 8 + [2], [3] * 5]
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    break_it(engine, requests[0])
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    assert_idle(engine)
    num_said = REQUEST_POINTS[break_it]
    for request, prompt in zip(requests, prompts, strict=True):
        output, tokens = request.output().outputs[0], continuation(prompt, MAX_TOKENS)
        if num_said is not None and request is requests[0]:
            assert isinstance(request.error, Broken)
            assert output.finish_reason == "error"
            assert output.token_ids == tokens[: len(output.token_ids)]
            assert engine.tokenizer.decode(tokens).startswith(output.text)
            assert output.text == engine.tokenizer.decode(tokens[:num_said]), "the text that it had stays"
        else:
            assert request.error is None
            assert (output.finish_reason, output.token_ids) == ("length", tokens)
            assert output.text == engine.tokenizer.decode(tokens)
    assert engine.metrics().finished == ({"length": 4} if num_said is None else {"length": 3, "error": 1})
    assert (engine.metrics().num_listener_errors > 0) == (break_it is break_listener)
    again = [engine.add_request(prompt, params) for prompt in prompts]
    while engine.has_unfinished:
        engine.step()
    assert [request.output().outputs[0].token_ids for request in again] == [
        continuation(prompt, MAX_TOKENS) for prompt in prompts
    ]
    assert all(request.output().num_cached_tokens == 8 for request in again[:3]), "nothing is wrong with its K/V"
