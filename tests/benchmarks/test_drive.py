"""What is recorded of a run, on an engine around a toy model."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.drive import Interrupted, Kind, RequestTimes, Tap, count_wasted_slots, drive
from benchmarks.workload import Workload
from nanoengine.engine.messages import Chunk, Decodes, Place, StepPlan, Tier, Transfer
from nanoengine.errors import InvalidPrompt
from tests.engine.engine_toys import Script, assert_idle, make_engine


def ignore(_: int) -> None:
    pass


def test_every_token_has_a_time_and_every_step_its_work() -> None:
    engine = make_engine(block_size=4)
    workload = Workload([[1] * 5, [2] * 9, [3] * 2], output_lens=[4, 1, 7])
    told: list[int] = []
    run = drive(engine, workload, told.append)
    assert [len(request.token_times) for request in run.requests] == [4, 1, 7]
    assert [len(request.output_token_ids) for request in run.requests] == [4, 1, 7]
    assert [request.num_prompt_tokens for request in run.requests] == [5, 9, 2]
    assert sum(told) == run.num_output_tokens == 12
    assert [step.kind for step in run.steps] == [Kind.PREFILL, *[Kind.DECODE] * 6]
    assert run.steps[0].num_seqs == 3
    assert run.steps[0].work.num_tokens == 16
    assert [step.num_seqs for step in run.steps[1:]] == [2, 2, 2, 1, 1, 1]
    ends = [time for step in run.steps for time in (step.start, step.end)]
    assert ends == sorted(ends)
    assert run.steps[-1].end <= run.seconds
    assert all(0 <= step.model_seconds <= step.end - step.start for step in run.steps)
    assert_idle(engine)


def test_a_step_of_prompts_and_decodes_is_a_mixed_one() -> None:
    engine = make_engine(block_size=4, policy="mixed", max_chunk=4)
    run = drive(engine, Workload([[1] * 3, [2] * 9], output_lens=[6, 2]), ignore)
    assert [step.kind for step in run.steps] == [Kind.PREFILL, Kind.MIXED, Kind.MIXED, *[Kind.DECODE] * 3]
    assert [step.work.num_tokens for step in run.steps] == [3 + 4, 1 + 4, 1 + 1, 2, 1, 1]
    assert [step.num_seqs for step in run.steps] == [2, 2, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        (StepPlan(chunks=[Chunk(0, 0, 1, (0,))]), Kind.PREFILL),  # of a prompt of one token
        (StepPlan(decodes=Decodes(np.zeros(1, np.int32), np.ones(1, np.int32))), Kind.DECODE),
        (StepPlan(transfers=[Transfer(Place(Tier.DEVICE, 1), Place(Tier.HOST, 0))]), None),
        (StepPlan(wait=True), None),
    ],
    ids=["prefill", "decode", "copies", "waits"],
)
def test_what_a_step_computes(plan: StepPlan, kind: Kind | None) -> None:
    assert Kind.of_plan(plan) is kind


@pytest.mark.parametrize("depth", [1, 2])
def test_every_step_is_recorded_with_its_own_plan(depth: int) -> None:
    engine = make_engine(max_steps_in_flight=depth)
    run = drive(engine, Workload([[1, 2], [3, 4]], [9, 9]), ignore)
    assert [step.kind for step in run.steps] == [Kind.PREFILL, *[Kind.DECODE] * 8]
    assert [step.num_seqs for step in run.steps] == [2] * 9


def test_streams_go_on_for_one_step_when_the_others_have_ended() -> None:
    engine = make_engine(block_size=4)
    workload = Workload([[1] * 3, [2] * 3, [3] * 9], output_lens=[50, 50, 4])
    run = drive(engine, workload, ignore, num_streams=2)
    assert [len(request.token_times) for request in run.requests] == [5, 5, 4]
    assert_idle(engine)


def test_a_tap_says_what_its_executor_says() -> None:
    engine = make_engine()
    engine.executor.info = object()  # type: ignore[misc, assignment]
    assert Tap(engine.executor).info is engine.executor.info


def test_the_engine_gets_its_executor_back() -> None:
    engine = make_engine()
    executor = engine.executor
    drive(engine, Workload([[1, 2]], [2]), ignore)
    assert engine.executor is executor


def test_requests_are_submitted_when_they_are_due() -> None:
    engine = make_engine()
    run = drive(engine, Workload([[1, 2], [3, 4], [5, 6]], [2, 2, 2]).arriving([0.03, 0.0, 0.06]), ignore)
    firsts = [request.token_times[0] for request in run.requests]
    assert firsts[1] < firsts[0] < firsts[2]
    assert all(request.token_times[0] >= request.due for request in run.requests)
    assert [request.due for request in run.requests] == [0.03, 0.0, 0.06]
    assert [step.num_seqs for step in run.steps] == [1] * 6, "they never met"


def test_waiting_counts_from_when_a_request_was_due() -> None:
    times = RequestTimes(due=2.0, num_prompt_tokens=3, token_times=[2.5, 2.6, 2.8])
    assert times.ttft == 0.5
    assert times.tpot == pytest.approx(0.15)
    assert times.itls == pytest.approx([0.1, 0.2])
    assert times.latency == pytest.approx(0.8)
    assert RequestTimes(0.0, 3, token_times=[1.0]).tpot is None


def test_hits_and_preemptions_are_counted() -> None:
    prompt = [7] * 9
    run = drive(make_engine(block_size=4), Workload([prompt, prompt], [2, 2]), ignore)
    assert [request.num_cached_tokens for request in run.requests] == [0, 8]
    tiny = make_engine(block_size=4, num_blocks=8, max_model_len=30)
    run = drive(tiny, Workload([[1] * 9, [2] * 9], [16, 16]), ignore)
    assert run.num_preemptions == tiny.scheduler.num_preemptions > 0
    assert max(step.num_waiting for step in run.steps) > 0
    again = drive(tiny, Workload([[3] * 9], [4]), ignore)
    assert again.num_preemptions == 0, "those of an earlier run are not counted again"


def test_wasted_slots_are_those_without_a_token() -> None:
    engine = make_engine(block_size=4, num_blocks=50)
    engine.add_request([1] * 9)
    engine.add_request([1] * 9)
    engine.step()
    # Each has 3 blocks for its 9 tokens and the next, and the full ones are shared: 4 in use, 3 empty slots in each tail.
    assert count_wasted_slots(engine.scheduler) == (6, 16)


def test_ctrl_c_leaves_the_engine_idle_and_tells_what_was_done() -> None:
    script = Script()
    script.errors = [None, None, KeyboardInterrupt()]
    engine = make_engine(script)
    workload = Workload([[1, 2], [3, 4]], [9, 9]).arriving([0.0, 1000.0])
    with pytest.raises(Interrupted) as stopped:
        drive(engine, workload, ignore)
    assert stopped.value.run.num_output_tokens == 2
    assert "2 output tokens in" in str(stopped.value)
    assert_idle(engine)


def test_a_failing_step_ends_the_run() -> None:
    script = Script()
    script.errors = [None, ValueError("the model broke")]
    engine = make_engine(script)
    with pytest.raises(ValueError, match="the model broke"):
        drive(engine, Workload([[1, 2], [3, 4]], [9, 9]).arriving([0.0, 1000.0]), ignore)
    assert_idle(engine)


def test_a_bad_prompt_is_refused_before_anything_runs() -> None:
    script = Script()
    with pytest.raises(InvalidPrompt):
        drive(make_engine(script), Workload([[1, 2], []], [9, 9]), ignore)
    assert script.plans == []
