"""Priorities: one order says who starts first and who gives way last, and changes nobody's tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.engine.scheduler import POLICIES, PREFILL_FIRST, Scheduler
from nanoengine.engine.sequence import Sequence
from nanoengine.sampling_params import BeamSearchParams, SamplingParams
from tests.engine.engine_toys import make_engine
from tests.engine.plan_mirror import PlanMirror
from tests.engine.test_beam_search import BeamModel, beams_of, expected_beams
from tests.engine.test_plans import LateBeams
from tests.engine.toys import (
    FAST,
    ToyModel,
    add_family,
    answer,
    assert_idle,
    continuation,
    drain,
    ids,
    is_prefill,
    make_scheduler,
    make_sequence,
    members,
    ran,
    run_step,
    step,
)
from tests.engine.workload import NO_EOS, Wish, assert_as_alone, serve, wishes


def add(scheduler: Scheduler, priorities: list[int], length: int = 3, **params: Any) -> list[Sequence]:
    """One sequence of each priority, in this order; their prompts share nothing."""
    seqs = [make_sequence(i, [10 * i + 1] * length, priority=own, **params) for i, own in enumerate(priorities)]
    for seq in seqs:
        scheduler.add(seq)
    return seqs


# ---- who comes first


def test_whose_priority_is_smaller_starts_first_and_equals_by_their_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    seqs = add(scheduler, [0, 5, -(2**63), 0, -1, 5, 2**63 - 1], max_tokens=1)
    order = []
    while scheduler.has_unfinished:
        order += ran(scheduler)
    assert order == ids(*(seqs[i] for i in (2, 4, 0, 3, 1, 5, 6)))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_newcomer_comes_before_all_that_wait_and_are_behind_it_but_takes_nothing_from_those_that_run(
    policy: str,
) -> None:
    scheduler = make_scheduler(max_num_seqs=2, policy=policy)
    a, b, c, urgent = (make_sequence(i, [10 * i] * 4, max_tokens=6 + 9 * i, priority=-(i == 3)) for i in range(4))
    for seq in (a, b, c):
        scheduler.add(seq)
    step(scheduler)
    scheduler.add(urgent)
    scheduler.check()
    while not a.finished:
        assert set(ran(scheduler)) == set(ids(a, b))
    assert urgent.seq_id in ran(scheduler)
    assert not c.num_computed_tokens


def test_who_found_no_room_is_not_asked_again_and_one_before_it_is() -> None:
    """The pool is as it was, and still there is one more to try."""
    scheduler = make_scheduler(num_blocks=6, max_model_len=24)
    [holder] = add(scheduler, [0], length=13, max_tokens=3)
    step(scheduler)
    large, small = (make_sequence(i, [50 + i] * length, priority=2 - i) for i, length in ((1, 12), (2, 3)))
    scheduler.add(large)
    assert ran(scheduler) == ids(holder)
    scheduler.add(small)
    assert ran(scheduler) == ids(small)
    assert list(scheduler.waiting) == [large]
    assert scheduler.num_preemptions == 0


# ---- who gives way


def test_the_victim_is_the_last_in_the_order_even_if_it_is_the_oldest() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16, max_num_seqs=2)
    patient, urgent, other = add(scheduler, [1, 0, 1], length=6, max_tokens=9)
    while not scheduler.num_preemptions:
        step(scheduler)
    assert scheduler.running == [urgent]
    assert list(scheduler.waiting) == [patient, other]
    assert (patient.num_preemptions, urgent.num_preemptions) == (1, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_in_the_order_moves_in_every_step_and_is_never_preempted(policy: str) -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=24, policy=policy)
    seqs = add(scheduler, [3, 0, -2, 3, 1, -2, 0, 7], max_tokens=20)
    while scheduler.has_unfinished:
        first = min((seq for seq in seqs if not seq.finished), key=lambda seq: seq.order)
        num_preemptions = first.num_preemptions
        plan = scheduler.schedule()
        assert first.seq_id in members(scheduler, plan) or (policy == PREFILL_FIRST and is_prefill(plan))
        assert first.num_preemptions == num_preemptions, "it can have given way only while another was the first"
        scheduler.update(plan, answer(plan))
        scheduler.check()
    assert scheduler.num_preemptions > 0


# ---- those who wait for others


@pytest.mark.parametrize("policy", POLICIES)
def test_completions_fork_from_their_prompt_though_somebody_else_has_come_before_them(policy: str) -> None:
    scheduler, model = make_scheduler(budget=8, caching=False, policy=policy), ToyModel()
    prompt = list(range(13))
    family = add_family(scheduler, prompt, 3, max_tokens=5)
    run_step(scheduler, model)
    urgent = make_sequence(9, [7] * 6, max_tokens=5, priority=-1)
    scheduler.add(urgent)
    assert scheduler.waiting[0] is urgent
    drain(scheduler, model)
    assert scheduler.num_forks == 2
    assert model.num_computed == 13 + 3 * 4 + 6 + 4, "the prompt once for all"
    assert all(seq.output_token_ids == continuation(prompt, 5) for seq in family)
    assert urgent.output_token_ids == continuation([7] * 6, 5)
    assert_idle(scheduler)


BEAMS = BeamSearchParams(beam_width=3, max_tokens=6, early_stopping="never")


def test_held_beams_give_way_if_those_they_wait_for_stand_behind_somebody_without_room() -> None:
    """Nothing runs that could end and make room: all would wait for each other."""
    engine = make_engine(BeamModel(), num_blocks=12, max_num_seqs=3, max_model_len=16, budget=8)
    busy = engine.make_request([50] * 5, SamplingParams(max_tokens=4, ignore_eos=True), priority=-2)
    beams = engine.make_beam_request([1, 1, 1], BEAMS)
    other = engine.make_beam_request([2, 2, 2], BEAMS, priority=-1)
    engine.submit(busy)
    engine.submit(beams)
    engine.step()
    assert len(engine.scheduler.running) == 3, "one beam has found no row"
    engine.submit(other)
    for _ in range(200):
        engine.step()
        engine.scheduler.check()
    assert busy.output().outputs[0].token_ids == continuation([50] * 5, 4)
    for request, prompt in ((beams, [1, 1, 1]), (other, [2, 2, 2])):
        assert beams_of(request.output()) == expected_beams(prompt, BEAMS)
    assert not engine.has_unfinished
    assert engine.scheduler.num_preemptions > 0


@settings(FAST, max_examples=100)
@given(
    workload=st.lists(wishes, max_size=5),
    searches=st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 12), st.sampled_from([-1, 0, 1])), min_size=1, max_size=4
    ),  # width, in which step it comes, priority
    num_blocks=st.integers(9, 24),
    budget=st.sampled_from([3, 8, 64]),
    max_num_seqs=st.integers(3, 6),
    caching=st.booleans(),
    policy=st.sampled_from(POLICIES),
    max_chunk=st.sampled_from([None, 2, 5]),
    max_steps_in_flight=st.sampled_from([1, 2]),
)
def test_beams_of_any_priority_beside_requests_of_any_priority_come_to_their_end(
    workload: list[Wish], searches: list[tuple[int, int, int]], **options: Any
) -> None:
    engine = make_engine(LateBeams(), eos=NO_EOS, max_model_len=28, **options)
    PlanMirror(engine.scheduler)
    params = [BeamSearchParams(beam_width=width, max_tokens=5, early_stopping="never") for width, _, _ in searches]
    prompts = [[i, i, 1, 1, 1] for i in range(len(searches))]
    beams = [
        engine.make_beam_request(prompt, own, priority=priority)
        for prompt, own, (_, _, priority) in zip(prompts, params, searches, strict=True)
    ]

    def submit_more(step: int) -> None:
        for request, (_, arrives, _) in zip(beams, searches, strict=True):
            if arrives == step:
                engine.submit(request)

    assert_as_alone(engine, workload, serve(engine, workload, before_step=submit_more))
    for request, prompt, own in zip(beams, prompts, params, strict=True):
        assert beams_of(request.output()) == expected_beams(prompt, own, NO_EOS)
