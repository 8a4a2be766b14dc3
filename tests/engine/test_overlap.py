"""Two steps in flight: tokens are the same as with one, whatever happens in between, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine import SamplingParams
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.messages import StepPlan, StepResult
from nanoengine.engine.scheduler import POLICIES
from nanoengine.outputs import TokenLogprob
from nanoengine.sampling_params import BeamSearchParams
from tests.engine.engine_toys import assert_idle, make_engine
from tests.engine.late_model import LateModel
from tests.engine.toys import (
    FAST,
    VOCAB_SIZE,
    ToyModel,
    answer,
    continuation,
    is_decode,
    is_prefill,
    make_scheduler,
    make_sequence,
    members,
    runs_of,
    sampled_rows,
)
from tests.engine.workload import NO_EOS, Wish, assert_as_alone, expected, serve, wishes


@FAST
@given(
    workload=st.lists(wishes, min_size=1, max_size=7),
    num_blocks=st.integers(8, 24),
    budget=st.sampled_from([3, 8, 64]),
    max_num_seqs=st.integers(2, 8),
    caching=st.booleans(),
    policy=st.sampled_from(POLICIES),
    max_chunk=st.sampled_from([None, 2, 5]),
)
def test_tokens_are_those_of_one_step_at_a_time(workload: list[Wish], **options: Any) -> None:
    model = LateModel()
    engine = make_engine(model, eos=NO_EOS, max_steps_in_flight=2, max_model_len=30, **options)
    assert_as_alone(engine, workload, serve(engine, workload))


def test_under_preemption_and_forks_steps_do_overlap() -> None:
    workload = [Wish((i % 2, 1, 2, i), 12, 1 + i % 3, frozenset({3}), 0, None) for i in range(8)]
    model = LateModel()
    engine = make_engine(model, eos=NO_EOS, max_steps_in_flight=2, num_blocks=8, max_model_len=30)
    for wish, request in zip(workload, serve(engine, workload), strict=True):
        assert all(output.token_ids == expected(wish) for output in request.output().outputs)
    assert engine.scheduler.num_preemptions > 5
    assert engine.scheduler.num_forks > 3
    assert model.num_overlapping > 0.8 * len(model.plans)


def test_a_step_costs_one_step_more_only_where_an_end_could_not_be_foreseen() -> None:
    def num_computed(stops: frozenset[int], depth: int) -> int:
        model = LateModel()
        serve(make_engine(model, eos=NO_EOS, max_steps_in_flight=depth), [Wish((1, 2, 3), 9, 1, stops, 0, None)])
        return model.num_computed

    assert num_computed(frozenset(), 2) == num_computed(frozenset(), 1) == 3 + 8
    stop = frozenset({continuation((1, 2, 3), 3)[-1] % 7})
    assert num_computed(stop, 2) == num_computed(stop, 1) + 1


def test_the_next_step_takes_tokens_that_nobody_has_seen() -> None:
    scheduler = make_scheduler()
    a, b = make_sequence(0, [1, 2, 3]), make_sequence(1, [4, 5])
    scheduler.add(a)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert (is_prefill(first), is_decode(second)) == (True, True)
    assert runs_of(second) == [(a.row, 3, 1)]
    assert sampled_rows(first) == [a.row]
    assert (second.started, second.tables) == ([], []), "the row's last token is where it was sampled, and nowhere else"
    assert (a.num_tokens, a.token_ids) == (5, [1, 2, 3])
    scheduler.add(b)
    third = scheduler.schedule()
    assert members(scheduler, third) == [b.seq_id]
    scheduler.check()
    scheduler.update(first, answer(first, 8))
    scheduler.update(second, answer(second, 9))
    assert a.output_token_ids == [8, 9]
    scheduler.update(third, answer(third, 7))
    assert members(scheduler, scheduler.schedule()) == [0, 1]
    assert (a.token_ids, b.token_ids) == ([1, 2, 3, 8, 9], [4, 5, 7])
    scheduler.check()


def test_a_row_is_given_on_at_once_and_belongs_to_one() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    a, b = make_sequence(0, [1, 2], max_tokens=1), make_sequence(1, [3, 4], max_tokens=1)
    scheduler.add(a)
    scheduler.add(b)
    plan = scheduler.schedule()
    assert not scheduler.schedule(), "its only token is on its way: there is nothing to decode"
    scheduler.update(plan, answer(plan))
    assert a.finish_reason == "length"
    assert [start.row for start in scheduler.schedule().started] == [0]
    scheduler.check()


def test_beams_wait_for_their_results() -> None:
    class WithLogprobs(LateModel):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            for i, (row, token) in enumerate(zip(sampled_rows(plan), result.token_ids, strict=True)):
                count = self.rows[row].sampling.params.num_logprobs or 0
                entries = {(token + rank) % VOCAB_SIZE: TokenLogprob(-0.5 - rank, rank + 1) for rank in range(count)}
                result.logprobs[i] = entries
            return result

    results = []
    for depth in (1, 2):
        model = WithLogprobs()
        engine = make_engine(model, eos=NO_EOS, max_steps_in_flight=depth)
        request = engine.make_beam_request([1, 2, 3], BeamSearchParams(beam_width=3, max_tokens=6))
        engine.submit(request)
        while engine.has_unfinished:
            engine.step()
            engine.scheduler.check()
        assert model.num_overlapping == 0
        results.append([output.token_ids for output in request.output().outputs])
    assert results[0] == results[1]


# ---- when a step fails


def poisoned(plan: StepPlan) -> bool:
    return any(13 in start.token_ids for start in plan.started)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failing_step_ends_its_own_requests_and_no_others(depth: int) -> None:
    model = LateModel(fail_if=poisoned)
    engine = make_engine(model, eos=NO_EOS, max_steps_in_flight=depth)
    good = engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=9))
    for _ in range(2):
        engine.step()
    bad = engine.add_request([13] * 9, SamplingParams(temperature=0.0, max_tokens=9))
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    assert_idle(engine)
    assert isinstance(bad.error, RuntimeError)
    assert good.output().outputs[0].token_ids == continuation([1, 2, 3], 9)


def test_who_shares_what_a_failed_step_was_to_write_fails_with_it() -> None:
    """A prompt that was admitted while the step was on its way has hit blocks that will never be written."""
    model = LateModel(fail_if=lambda plan: is_prefill(plan) and plan.num_new_tokens == 9)
    engine = make_engine(model, eos=NO_EOS, max_steps_in_flight=2, max_num_seqs=8, budget=9)
    params = SamplingParams(temperature=0.0, max_tokens=5)
    first = engine.add_request([1] * 9, params)
    second = engine.add_request([1] * 9 + [2], params)
    other = engine.add_request([3] * 4, params)
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    assert_idle(engine)
    assert first.error is not None
    assert second.error is not None
    assert other.output().outputs[0].token_ids == continuation([3] * 4, 5)
    again = engine.add_request([1] * 8, params)
    while engine.has_unfinished:
        engine.step()
    assert again.output().num_cached_tokens == 0, "what was never written is never hit"
    assert again.output().outputs[0].token_ids == continuation([1] * 8, 5)


def run_to_the_end(engine: LLMEngine) -> None:
    while engine.has_unfinished:
        engine.step()


@pytest.mark.parametrize("where", ["launch", "result"])
def test_after_ctrl_c_the_engine_goes_on(where: str) -> None:
    class Interrupting(LateModel):
        armed = False

        def launch(self, plan: StepPlan) -> Any:
            if self.armed and where == "launch":
                self.armed = False
                raise KeyboardInterrupt
            step = super().launch(plan)
            if self.armed:
                self.armed = False

                def interrupted() -> Any:
                    raise KeyboardInterrupt

                step.result = interrupted  # type: ignore[method-assign]
            return step

    model = Interrupting()
    engine = make_engine(model, eos=NO_EOS, max_steps_in_flight=2)
    params = SamplingParams(temperature=0.0, max_tokens=9)
    engine.add_request([1, 2, 3], params)
    engine.step()
    model.armed = True
    with pytest.raises(KeyboardInterrupt):
        run_to_the_end(engine)
    engine.scheduler.check()
    assert_idle(engine)
    request = engine.add_request([1, 2, 4], params)
    while engine.has_unfinished:
        engine.step()
    assert request.output().outputs[0].token_ids == continuation([1, 2, 4], 9)


def test_closing_waits_for_what_is_on_its_way() -> None:
    model = LateModel()
    engine = make_engine(model, eos=NO_EOS, max_steps_in_flight=2)
    engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=50))
    engine.step()
    assert engine.scheduler.num_in_flight
    engine.close()
    assert engine.scheduler.num_in_flight == 0
    assert not model.queue
    assert model.closed == 1


def test_an_eager_executor_takes_two_steps_in_flight_as_well() -> None:
    workload = [Wish((i, i, 2), 7, 1, frozenset({i % 7}), i, None) for i in range(6)]
    engine = make_engine(ToyModel(), eos=NO_EOS, max_steps_in_flight=2)
    for wish, request in zip(workload, serve(engine, workload), strict=True):
        assert request.output().outputs[0].token_ids == expected(wish)
