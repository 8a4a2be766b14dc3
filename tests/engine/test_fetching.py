"""Sequences whose K/V is read from files wait in a state of their own, and nobody waits for them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.messages import FileDone, StepPlan, StepResult, Tier
from nanoengine.engine.scheduler import POLICIES, Scheduler
from nanoengine.engine.sequence import Status
from nanoengine.sampling_params import SamplingParams
from tests.engine.engine_toys import Clock, DigitTokenizer, assert_idle
from tests.engine.toys import VOCAB_SIZE, ToyModel, continuation, make_sequence, members, run_step

B = 4
FILED = [9] * 13
"""A prompt whose blocks are in files."""


class SlowFiles(ToyModel):
    """Its files are done when a test says so, or when there is nothing else to do."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.unanswered: list[FileDone] = []
        self.is_quick = True
        self.num_waits = 0

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        self.unanswered += result.files
        self.num_waits += plan.wait
        result.files = []
        if self.is_quick or plan.wait:
            result.files, self.unanswered = self.unanswered, []
        return result


def make_files(folder: Path, model: ToyModel, **options: Any) -> Scheduler:
    """A scheduler behind whose pool `FILED` has gone to files, through host memory."""
    scheduler = Scheduler(
        BlockManager(8, B, host=HostTier(4), disk=DiskTier(folder, "model", 8, 1 << 20)),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=32,
        **options,
    )
    for seq_id, prompt in enumerate((FILED, [50] * 28, [51] * 28)):
        seq = make_sequence(-9 + seq_id, prompt, max_tokens=1)
        scheduler.add(seq)
        while not seq.finished:
            run_step(scheduler, model)
    return scheduler


def behind_files(folder: Path, *, policy: str = POLICIES[0]) -> tuple[Scheduler, SlowFiles]:
    model = SlowFiles()
    scheduler = make_files(folder, model, policy=policy)
    model.is_quick = False
    return scheduler, model


def finish_all(scheduler: Scheduler, model: ToyModel) -> None:
    for _ in range(300):
        plan = run_step(scheduler, model)
        if not plan and not scheduler.has_unfinished:
            return
    raise AssertionError("the scheduler does not come to an end")


@pytest.mark.parametrize("policy", POLICIES)
def test_while_one_waits_for_files_those_behind_it_run(policy: str, tmp_path: Path) -> None:
    scheduler, model = behind_files(tmp_path, policy=policy)
    filed, other = make_sequence(0, FILED, max_tokens=4), make_sequence(1, [7] * 5, max_tokens=6)
    for seq in (filed, other):
        scheduler.add(seq)
    plan = run_step(scheduler, model)
    assert len({read.slot for read in plan.reads}) == 3
    assert (filed.status, scheduler.fetching) == (Status.FETCHING, [filed])
    assert filed not in scheduler.waiting
    assert filed not in scheduler.running
    for _ in range(3):
        plan = run_step(scheduler, model)
        assert not plan.wait, "there is something to compute"
        assert filed.status is Status.FETCHING
    assert other.num_output_tokens == 4
    model.is_quick = True  # the next results say that the files are done
    run_step(scheduler, model)
    assert (filed.status, list(scheduler.waiting)) == (Status.WAITING, [filed])
    run_step(scheduler, model)
    assert filed.status is Status.RUNNING
    assert filed.num_cached_tokens == 12
    finish_all(scheduler, model)
    assert filed.output_token_ids == continuation(FILED, 4)
    assert other.output_token_ids == continuation([7] * 5, 6)
    assert scheduler.block_manager.stats.hits_by_tier[Tier.DISK] == 12


@pytest.mark.parametrize("policy", POLICIES)
def test_where_all_wait_for_files_the_executor_is_told_to_wait(policy: str, tmp_path: Path) -> None:
    scheduler, model = behind_files(tmp_path, policy=policy)
    filed = make_sequence(0, FILED, max_tokens=4)
    scheduler.add(filed)
    plan = scheduler.schedule()
    assert plan.wait
    assert not plan.computes
    assert not scheduler.schedule(), "one plan that waits is enough"
    assert scheduler.has_unfinished
    scheduler.update(plan, model.execute(plan))
    scheduler.check()
    assert model.num_waits == 1
    finish_all(scheduler, model)
    assert filed.output_token_ids == continuation(FILED, 4)


def test_with_a_step_in_flight_nobody_waits(tmp_path: Path) -> None:
    """Its results come anyway, and may say that a file is done."""
    scheduler, model = behind_files(tmp_path)
    other = make_sequence(0, [7] * 5, max_tokens=1)
    scheduler.add(other)
    first = scheduler.schedule()
    scheduler.add(make_sequence(1, FILED, max_tokens=4))
    second = scheduler.schedule()
    assert second.reads
    assert not second.wait
    assert not scheduler.schedule()
    for plan in (first, second):
        scheduler.update(plan, model.execute(plan))
    third = scheduler.schedule()
    assert third.wait
    scheduler.update(third, model.execute(third))
    finish_all(scheduler, model)


def test_whoever_comes_back_from_files_has_the_place_of_its_age(tmp_path: Path) -> None:
    scheduler, model = behind_files(tmp_path)
    running, filed, newer = (
        make_sequence(i, prompt, max_tokens=4) for i, prompt in enumerate(([7] * 5, FILED, [8] * 5))
    )
    for seq in (running, filed):
        scheduler.add(seq)
    run_step(scheduler, model)
    model.is_quick = True
    plan = scheduler.schedule()
    scheduler.add(newer)
    scheduler.update(plan, model.execute(plan))
    scheduler.check()
    assert list(scheduler.waiting) == [filed, newer]
    plan = scheduler.schedule()
    assert members(scheduler, plan) == [1, 2]
    scheduler.update(plan, model.execute(plan))
    finish_all(scheduler, model)
    assert filed.output_token_ids == continuation(FILED, 4)


@pytest.mark.parametrize("when", ["it waits for files", "its files have come"])
def test_it_can_be_aborted_at_any_time_and_gives_back_what_was_kept_for_it(when: str, tmp_path: Path) -> None:
    scheduler, model = behind_files(tmp_path)
    filed, other = make_sequence(0, FILED), make_sequence(1, [7] * 5, max_tokens=6)
    for seq in (filed, other):
        scheduler.add(seq)
    run_step(scheduler, model)
    if when == "its files have come":
        model.is_quick = True
        run_step(scheduler, model)
        assert filed.status is Status.WAITING
    scheduler.finish(filed, "abort")
    scheduler.check()
    assert not scheduler.fetching
    model.is_quick = True
    finish_all(scheduler, model)
    host = scheduler.block_manager.tiers.host
    assert host is not None
    assert host.pins == [0] * 4
    assert other.output_token_ids == continuation([7] * 5, 6)
    again = make_sequence(2, FILED, max_tokens=4)
    scheduler.add(again)
    finish_all(scheduler, model)
    assert again.output_token_ids == continuation(FILED, 4)


@pytest.mark.parametrize("num_bad", [1, 2, 3])
def test_a_file_that_cannot_be_read_is_a_miss(num_bad: int, tmp_path: Path) -> None:
    scheduler, model = behind_files(tmp_path)
    filed = make_sequence(0, FILED, max_tokens=4)
    scheduler.add(filed)
    plan = scheduler.schedule()
    for read in plan.reads[-num_bad:]:
        del model.files[read.path]
    scheduler.update(plan, model.execute(plan))
    finish_all(scheduler, model)
    assert filed.num_cached_tokens == 12 - num_bad * B
    assert filed.output_token_ids == continuation(FILED, 4)
    assert scheduler.block_manager.stats.num_bad_files == num_bad


def test_a_step_that_fails_ends_nobody_who_waits_for_files(tmp_path: Path) -> None:
    scheduler, model = behind_files(tmp_path)
    filed, other = make_sequence(0, FILED, max_tokens=4), make_sequence(1, [7] * 5, max_tokens=6)
    for seq in (filed, other):
        scheduler.add(seq)
    model.fail_if = lambda plan: bool(plan.reads)
    plan = scheduler.schedule()
    with pytest.raises(RuntimeError):
        model.execute(plan)
    assert scheduler.fail() == [other]
    scheduler.check()
    assert filed.status is Status.FETCHING
    model.fail_if = lambda _: False
    finish_all(scheduler, model)
    assert filed.output_token_ids == continuation(FILED, 4)
    assert filed.num_cached_tokens == 12, "its files were read after all"


# ---- the whole engine


def make_slow_engine(folder: Path, depth: int) -> tuple[LLMEngine, SlowFiles]:
    scheduler, model = behind_files(folder)
    engine = LLMEngine(
        scheduler, model, DigitTokenizer(), vocab_size=VOCAB_SIZE, clock=Clock(), max_steps_in_flight=depth
    )
    return engine, model


PARAMS = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_with_nothing_but_fetching_sequences_waits_and_goes_on(depth: int, tmp_path: Path) -> None:
    engine, model = make_slow_engine(tmp_path, depth)
    requests = [engine.add_request(FILED, PARAMS) for _ in range(2)]
    assert engine.step() == []
    for _ in range(100):
        if not engine.has_unfinished:
            break
        engine.step()
        engine.scheduler.check()
    assert_idle(engine)
    assert model.num_waits >= 1
    for request in requests:
        assert request.output().outputs[0].token_ids == continuation(FILED, 4)
    assert engine.metrics().num_fetching == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_metrics_tell_of_those_that_wait_for_files_and_aborts_end_them(depth: int, tmp_path: Path) -> None:
    engine, _ = make_slow_engine(tmp_path, depth)
    other = engine.add_request([7] * 5, SamplingParams(temperature=0.0, max_tokens=9))
    request = engine.add_request(FILED, PARAMS)
    engine.step()
    metrics = engine.metrics()
    assert (metrics.num_fetching, metrics.num_running, metrics.num_waiting) == (1, 1, 0)
    assert engine.abort(request.request_id)
    assert engine.metrics().num_fetching == 0
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    assert_idle(engine)
    assert other.output().outputs[0].token_ids == continuation([7] * 5, 9)


@pytest.mark.parametrize("depth", [1, 2])
def test_ctrl_c_while_it_waits_for_a_file_loses_neither_the_file_nor_the_request(depth: int, tmp_path: Path) -> None:
    engine, model = make_slow_engine(tmp_path, depth)
    request = engine.add_request(FILED, PARAMS)
    execute = model.execute

    def interrupted(plan: StepPlan) -> StepResult:  # noqa: ARG001 - it is never carried out
        model.execute = execute  # type: ignore[method-assign]
        raise KeyboardInterrupt

    model.execute = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.scheduler.check()
    assert not request.finished, "no step has touched its data"
    for _ in range(100):
        if not engine.has_unfinished:
            break
        engine.step()
        engine.scheduler.check()
    assert_idle(engine)
    assert request.output().outputs[0].token_ids == continuation(FILED, 4)


def test_an_answer_that_is_lost_with_ctrl_c_is_asked_for_again(tmp_path: Path) -> None:
    """The read was ordered by an earlier plan, which has long been committed."""
    engine, model = make_slow_engine(tmp_path, 1)
    model.is_quick = False
    execute, num_before, interrupted = model.execute, len(model.plans), []

    def lose_the_first_answer(plan: StepPlan) -> StepResult:
        model.is_quick = len(model.plans) > num_before + 2
        result = execute(plan)
        if result.files and not plan.reads and not interrupted:
            interrupted.append(plan)
            raise KeyboardInterrupt
        return result

    model.execute = lose_the_first_answer  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=9)
    filed, _other = engine.add_request(FILED, params), engine.add_request([7] * 5, params)
    for _ in range(60):
        with suppress(KeyboardInterrupt):
            engine.step()
    assert interrupted
    assert filed.finished
    assert filed.output().outputs[0].token_ids == continuation(FILED, 9)
    assert_idle(engine)
