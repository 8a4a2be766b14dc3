"""What is recorded of a run, on an engine around a toy model."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.drive import Interrupted, Kind, count_wasted_slots, drive
from benchmarks.workload import Workload
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.messages import Run, StepPlan
from tests.core.toys import Done, ToyModel, make_engine


class InterruptedModel(ToyModel):
    """Ctrl-C comes while it is given its third plan."""

    def launch(self, plan: StepPlan) -> Done:
        if self.num_launched == 2:
            raise KeyboardInterrupt
        return super().launch(plan)


def ignore(_: int) -> None:
    pass


def assert_idle(engine: LLMEngine) -> None:
    assert not engine.has_unfinished
    assert not engine.requests
    assert not engine.scheduler.in_flight
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks


@pytest.mark.parametrize("depth", [1, 2])
def test_every_token_has_a_time_and_every_step_its_work(depth: int) -> None:
    engine = make_engine(block_size=4, depth=depth)
    executor = engine.executor
    told: list[int] = []
    run = drive(engine, Workload([[1] * 5, [2] * 9, [3] * 2], output_lens=[4, 1, 7]), told.append)
    assert [len(request.token_times) for request in run.requests] == [4, 1, 7]
    assert sum(told) == run.num_output_tokens == 12
    assert [step.kind for step in run.steps] == [Kind.PREFILL, *[Kind.DECODE] * 6]
    assert run.steps[0].work.num_tokens == 16
    assert [step.num_seqs for step in run.steps] == [3, 2, 2, 2, 1, 1, 1]
    if depth == 1:
        ends = [time for step in run.steps for time in (step.start, step.end)]
        assert ends == sorted(ends)
    assert run.steps[-1].end <= run.seconds
    spent = [step.model_seconds for step in run.steps]  # with two steps in flight, in two calls: that of its launch too
    assert min(spent) >= 0
    assert sum(spent) <= run.seconds + 1e-9, "but for rounding"
    assert engine.executor is executor
    assert_idle(engine)


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        (StepPlan(runs=[Run(0, 0, 1, True)]), Kind.PREFILL),  # of a prompt of one token
        (StepPlan(decode_rows=np.zeros(1, np.int32), decode_starts=np.ones(1, np.int32)), Kind.DECODE),
        (StepPlan(runs=[Run(0, 3, 3, True, (5, 6))]), Kind.DECODE),
        (StepPlan(runs=[Run(0, 3, 3, True, (5, 6)), Run(1, 0, 4, True)]), Kind.MIXED),
        (StepPlan(extras={"kv_offload": "copies"}), None),
    ],
    ids=["prefill", "decode", "drafts", "drafts and a prompt", "copies"],
)
def test_what_a_step_computes(plan: StepPlan, kind: Kind | None) -> None:
    assert Kind.of_plan(plan) is kind


def test_streams_go_on_for_one_step_when_the_others_have_ended() -> None:
    engine = make_engine(block_size=4)
    workload = Workload([[1] * 3, [2] * 3, [3] * 9], output_lens=[50, 50, 4])
    run = drive(engine, workload, ignore, num_streams=2)
    assert [len(request.token_times) for request in run.requests] == [5, 5, 4]
    assert_idle(engine)


def test_requests_are_submitted_when_they_are_due() -> None:
    engine = make_engine()
    run = drive(engine, Workload([[1, 2], [3, 4], [5, 6]], [2, 2, 2], [0.03, 0.0, 0.06]), ignore)
    firsts = [request.token_times[0] for request in run.requests]
    assert firsts[1] < firsts[0] < firsts[2]
    assert all(request.token_times[0] >= request.due for request in run.requests)
    assert [request.due for request in run.requests] == [0.03, 0.0, 0.06]
    assert [step.num_seqs for step in run.steps] == [1] * 6, "they never met"


def test_preemptions_are_counted() -> None:
    tiny = make_engine(block_size=4, num_blocks=8, max_model_len=30)
    run = drive(tiny, Workload([[1] * 9, [2] * 9], [16, 16]), ignore)
    assert run.num_preemptions == tiny.scheduler.num_preemptions > 0
    again = drive(tiny, Workload([[3] * 9], [4]), ignore)
    assert again.num_preemptions == 0, "those of an earlier run are not counted again"


def test_wasted_slots_are_those_without_a_token() -> None:
    engine = make_engine(block_size=4, num_blocks=50)
    for _ in range(2):
        engine.submit(engine.make_request([1] * 9))
    for _ in range(2):  # the second waits for what the first computes
        engine.step()
    # Each has 3 blocks for its 9 tokens and the next, and the full ones are shared: 4 in use, 3 empty slots in each tail.
    assert count_wasted_slots(engine.scheduler) == (6, 16)


def test_ctrl_c_leaves_the_engine_idle_and_tells_what_was_done() -> None:
    engine = make_engine(model=InterruptedModel(4))
    workload = Workload([[1, 2], [3, 4]], [9, 9], [0.0, 1000.0])
    with pytest.raises(Interrupted) as stopped:
        drive(engine, workload, ignore)
    assert stopped.value.run.num_output_tokens == 2
    assert "2 output tokens in" in str(stopped.value)
    assert_idle(engine)
