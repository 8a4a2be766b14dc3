"""Two policies, the same tokens: they differ in who computes when, and that is theirs alone to say."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.engine.messages import StepPlan, StepResult
from nanoengine.engine.scheduler import MIXED, POLICIES, PREFILL_FIRST, Scheduler
from nanoengine.sampling_params import BeamSearchParams, SamplingParams
from tests.engine.engine_toys import make_engine
from tests.engine.test_beam_search import PARAMS, add_beams, beams_of, expected_beams
from tests.engine.test_plans import LateBeams
from tests.engine.toys import (
    FAST,
    ToyModel,
    add,
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
    new_tokens,
    ran,
    run_step,
    sampled_rows,
    step,
)
from tests.engine.workload import NO_EOS, Wish, assert_as_alone, serve, wishes

# ---- the same tokens


@settings(FAST, max_examples=100)
@given(
    workload=st.lists(wishes, min_size=1, max_size=6),
    options=st.fixed_dictionaries(
        {
            "num_blocks": st.integers(9, 24),
            "budget": st.integers(3, 40),
            "max_num_seqs": st.integers(3, 8),
            "caching": st.booleans(),
            "max_chunk": st.one_of(st.none(), st.integers(1, 9)),
        }
    ),
    depth=st.sampled_from([1, 2]),
    with_beams=st.booleans(),
)
def test_both_policies_give_what_each_request_would_get_alone(
    workload: list[Wish], options: dict[str, Any], depth: int, with_beams: bool
) -> None:
    for policy in POLICIES:
        engine = make_engine(
            LateBeams(), eos=NO_EOS, max_model_len=30, max_steps_in_flight=depth, policy=policy, **options
        )
        params = BeamSearchParams(beam_width=3, max_tokens=5, early_stopping="never")
        beams = add_beams(engine, [9, 1, 1], params) if with_beams else None
        assert_as_alone(engine, workload, serve(engine, workload))
        if beams is not None:
            assert beams_of(beams.output()) == expected_beams([9, 1, 1], params, NO_EOS)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_chunk", [1, 2, 3, 4, 5, 7, 8, 12, None])
@pytest.mark.parametrize(("budget", "num_blocks"), [(4, 64), (9, 64), (64, 64), (9, 8), (64, 8)])
def test_every_cap_budget_and_pool_gives_the_same_tokens(
    policy: str, max_chunk: int | None, budget: int, num_blocks: int
) -> None:
    scheduler = make_scheduler(
        num_blocks=num_blocks, max_model_len=30, budget=budget, max_num_seqs=4, policy=policy, max_chunk=max_chunk
    )
    prompts = [[5] * 13, [5] * 8 + [6], [7], list(range(17)), [5] * 13]
    seqs = [make_sequence(i, prompt, max_tokens=9) for i, prompt in enumerate(prompts)]
    for seq in seqs:
        scheduler.add(seq)
    plans = drain(scheduler, ToyModel())
    assert [seq.output_token_ids for seq in seqs] == [continuation(prompt, 9) for prompt in prompts]
    assert max(chunk.num_new for plan in plans for chunk in plan.chunks) <= (max_chunk or budget)
    assert max(plan.num_new_tokens for plan in plans) <= budget
    assert (scheduler.num_preemptions > 0) == (num_blocks == 8)
    assert_idle(scheduler)


@pytest.mark.parametrize("policy", POLICIES)
def test_beams_beside_long_prompts_are_those_of_the_search_alone(policy: str) -> None:
    engine = make_engine(LateBeams(), policy=policy, max_chunk=3, budget=10, max_steps_in_flight=2)
    beams = add_beams(engine, range(4), PARAMS)
    for _ in range(3):
        engine.step()
    others = [engine.add_request([50 + i] * 20, SamplingParams(max_tokens=6, ignore_eos=True)) for i in range(3)]
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    assert beams_of(beams.output()) == expected_beams(range(4), PARAMS)
    for i, request in enumerate(others):
        assert request.output().outputs[0].token_ids == continuation([50 + i] * 20, 6)


# ---- prompts first


def test_prompts_first_computes_prompts_alone_while_any_can_start() -> None:
    scheduler = make_scheduler(budget=8, policy=PREFILL_FIRST)
    [a] = add(scheduler, 3)
    step(scheduler)
    add(scheduler, 20)
    for _ in range(3):
        assert is_prefill(step(scheduler))
    assert a.num_output_tokens == 1, "it has waited"
    assert len(ran(scheduler)) == 2


# ---- mixed


def watch_mixed_steps(scheduler: Scheduler) -> list[tuple[int, int]]:
    """Run to the end, where nobody has to give way, and check who is in each step; returns how many (decodes, chunks) it had."""
    seen = []
    while scheduler.has_unfinished:
        decoding = [seq for seq in scheduler.running if seq.decoding]
        lengths = {seq: seq.num_known_tokens for seq in decoding}
        plan = scheduler.schedule()
        num_decodes = len(plan.decodes.rows)
        assert sorted(members(scheduler, plan)[:num_decodes]) == ids(*decoding)
        assert all(chunk.num_new <= scheduler.max_chunk for chunk in plan.chunks)
        left = scheduler.max_num_batched_tokens - plan.num_new_tokens
        cut = [chunk.num_new for chunk in plan.chunks if not chunk.samples]
        assert left == 0 or all(count == scheduler.max_chunk for count in cut), "no prompt waits for nothing"
        assert left >= 0
        seen.append((num_decodes, len(plan.chunks)))
        scheduler.update(plan, answer(plan))
        scheduler.check()
        assert all(seq.num_known_tokens == length + 1 for seq, length in lengths.items()), "each gets its token"
    return seen


@pytest.mark.parametrize(("budget", "max_chunk"), list(itertools.product([4, 7, 16, 40], [None, 1, 3, 8])))
def test_in_mixed_steps_every_running_sequence_gets_its_token_and_prompts_what_is_left(
    budget: int, max_chunk: int | None
) -> None:
    scheduler = make_scheduler(budget=budget, policy=MIXED, max_chunk=max_chunk, max_num_seqs=4)
    add(scheduler, 3, 17, 9, 30, 2, 11, max_tokens=12)
    seen = watch_mixed_steps(scheduler)
    assert any(decodes and chunks for decodes, chunks in seen)
    assert_idle(scheduler)


def test_a_prompt_takes_what_the_decodes_leave() -> None:
    scheduler = make_scheduler(budget=8, policy=MIXED)
    a, b = add(scheduler, 3, 3)
    step(scheduler)
    [c] = add(scheduler, 20)
    plan = scheduler.schedule()
    assert members(scheduler, plan) == ids(a, b, c)
    assert new_tokens(plan) == [1, 1, 6]
    assert sampled_rows(plan) == [a.row, b.row], "the prompt is not at its end"


def test_the_chunk_that_ends_a_prompt_samples_beside_the_decodes() -> None:
    scheduler = make_scheduler(budget=8, policy=MIXED)
    [a] = add(scheduler, 3)
    step(scheduler)
    [b] = add(scheduler, 9)
    assert new_tokens(step(scheduler)) == [1, 7]
    plan = step(scheduler)
    assert new_tokens(plan) == [1, 2]
    assert sampled_rows(plan) == [a.row, b.row]
    assert (a.num_output_tokens, b.num_output_tokens) == (3, 1)
    assert new_tokens(step(scheduler)) == [1, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_with_a_cap_several_prompts_are_begun_at_once(policy: str) -> None:
    scheduler = make_scheduler(budget=16, policy=policy, max_chunk=4)
    a, b, c = add(scheduler, 20, 6, 20)
    plan = step(scheduler)
    assert new_tokens(plan) == [4, 4, 4]
    assert scheduler.begun == [a, b, c]
    assert new_tokens(step(scheduler)) == [4, 2, 4]
    assert scheduler.begun == [a, c]
    assert b.num_output_tokens == 1


def test_without_a_cap_a_prompt_is_finished_before_the_next_is_begun() -> None:
    scheduler = make_scheduler(budget=8, policy=MIXED)
    a, b = add(scheduler, 20, 20)
    while not a.num_output_tokens:
        step(scheduler)
        assert len(scheduler.begun) <= 1
        assert b.num_computed_tokens == 0 or a.num_computed_tokens == 20


def test_those_that_were_begun_come_before_those_that_wait() -> None:
    scheduler = make_scheduler(budget=4, policy=MIXED, max_chunk=3)
    a, b, c = add(scheduler, 7, 7, 7)
    assert ran(scheduler) == ids(a, b)
    assert (a.num_computed_tokens, b.num_computed_tokens) == (3, 1)
    assert ran(scheduler) == ids(a, b)
    assert (a.num_computed_tokens, b.num_computed_tokens) == (6, 2)
    assert c not in scheduler.running


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_that_is_begun_can_be_aborted_and_serves_only_what_was_written(policy: str) -> None:
    scheduler, model = make_scheduler(budget=16, policy=policy, max_chunk=6), ToyModel()
    first, other = make_sequence(0, range(20)), make_sequence(1, [7] * 20, max_tokens=3)
    for seq in (first, other):
        scheduler.add(seq)
    run_step(scheduler, model)
    scheduler.finish(first, "abort")
    again = make_sequence(2, range(20), max_tokens=4)
    scheduler.add(again)
    drain(scheduler, model)
    assert again.num_cached_tokens == 4
    assert again.output_token_ids == continuation(range(20), 4)
    assert other.output_token_ids == continuation([7] * 20, 3)
    assert_idle(scheduler)


def test_the_newest_gives_way_in_the_middle_of_its_prompt_and_begins_again() -> None:
    scheduler, model = make_scheduler(num_blocks=7, max_model_len=24, policy=MIXED, max_chunk=2), ToyModel()
    a, b = make_sequence(0, [1] * 11, max_tokens=12), make_sequence(1, [2] * 11, max_tokens=12)
    scheduler.add(a)
    while not a.num_output_tokens:
        run_step(scheduler, model)
    scheduler.add(b)
    was_cut = False
    while scheduler.has_unfinished:
        was_begun, num_preemptions = b in scheduler.begun, b.num_preemptions
        run_step(scheduler, model)
        was_cut |= was_begun and b.num_preemptions > num_preemptions
    assert was_cut
    for seq, prompt in ((a, [1] * 11), (b, [2] * 11)):
        assert seq.output_token_ids == continuation(prompt, 12)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cap", [None, 8, 3])
def test_completions_wait_for_a_prompt_that_is_computed_in_pieces_and_fork_from_it(
    policy: str, cap: int | None
) -> None:
    scheduler = make_scheduler(
        num_blocks=200, max_num_seqs=8, budget=64, max_model_len=100, policy=policy, max_chunk=cap
    )
    model, prompt = ToyModel(), list(range(60))
    family = add_family(scheduler, prompt, 7, max_tokens=2)
    other = make_sequence(1000, [7] * 5, max_tokens=2)
    scheduler.add(other)
    plans = drain(scheduler, model)
    assert sum(chunk.num_new for plan in plans for chunk in plan.chunks) == 60 + 5, "once for all"
    assert scheduler.num_forks == 6
    assert {tuple(seq.output_token_ids) for seq in family} == {tuple(continuation(prompt, 2))}
    assert other.output_token_ids == continuation(other.token_ids[:5], 2)
    for plan in plans:
        assert all(chunk.num_new <= (cap or 64) for chunk in plan.chunks)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_blocks_of_one_token_keep_up_with_any_depth(policy: str, depth: int) -> None:
    """A block is full in every step, and its tokens are known some steps later."""
    scheduler, model = make_scheduler(num_blocks=40, block_size=1, max_model_len=30, policy=policy), ToyModel(1)
    seqs = add(scheduler, 3, 5, 2, max_tokens=12)
    prompts = [list(seq.token_ids) for seq in seqs]
    in_flight: deque[tuple[StepPlan, StepResult]] = deque()
    while scheduler.has_unfinished or in_flight:
        while len(in_flight) < depth and (plan := scheduler.schedule()):
            scheduler.check()
            in_flight.append((plan, model.execute(plan)))
        scheduler.update(*in_flight.popleft())
        scheduler.check()
    assert [seq.output_token_ids for seq in seqs] == [continuation(prompt, 12) for prompt in prompts]
