"""When blocks run out: the newest gives way, loses nothing but time, and everybody ends."""

from __future__ import annotations

import random

import pytest

from nanoengine.engine.messages import StepResult
from nanoengine.engine.scheduler import POLICIES, PREFILL_FIRST, Scheduler
from nanoengine.engine.sequence import Sequence, Status
from nanoengine.outputs import TokenLogprob
from nanoengine.sampling_params import SamplingParams
from tests.engine.toys import (
    ToyModel,
    add,
    answer,
    assert_idle,
    continuation,
    drain,
    ids,
    is_decode,
    is_prefill,
    make_scheduler,
    make_sequence,
    members,
    ran,
    run_step,
    runs_of,
    samples_of,
    step,
)


def preempted() -> tuple[Scheduler, tuple[Sequence, Sequence], ToyModel]:
    """Two sequences in a pool of 4 blocks, at the point where the older one took a block of the newer one."""
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    model = ToyModel()
    a, b = make_sequence(0, [1] * 6, max_tokens=9), make_sequence(1, [2] * 6, max_tokens=9)
    scheduler.add(a)
    scheduler.add(b)
    while not scheduler.num_preemptions:
        run_step(scheduler, model)
    return scheduler, (a, b), model


def test_the_newest_sequence_is_the_victim_and_goes_to_the_front_of_the_queue() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16, max_num_seqs=2)
    a, b, c = add(scheduler, 6, 6, 2, max_tokens=9)
    while not scheduler.num_preemptions:
        step(scheduler)
    assert scheduler.running == [a]
    assert list(scheduler.waiting) == [b, c]
    assert b.status is Status.WAITING
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)


def test_a_victim_may_be_the_very_sequence_that_lacks_a_block() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    a, b = add(scheduler, 4, 7, max_tokens=9)
    while not scheduler.num_preemptions:
        who = ran(scheduler)
    assert who == ids(a)
    assert b.num_preemptions == 1


def test_preemption_frees_all_blocks_and_keeps_the_tokens() -> None:
    _, (_, b), _ = preempted()
    assert b.block_tables == []
    assert b.num_computed_tokens == 0
    assert b.output_token_ids == continuation([2] * 6, 3)


def test_a_preempted_sequence_computes_prompt_and_output_again_and_goes_on() -> None:
    scheduler, (a, b), model = preempted()
    tokens = list(b.token_ids)
    while b.status is not Status.RUNNING:
        plan = run_step(scheduler, model)
    assert a.finished
    assert is_prefill(plan)
    [(row, cached, new)] = runs_of(plan)
    assert cached + new == len(tokens)
    assert [(start.row, start.token_ids) for start in plan.started] == [(row, tokens)]
    assert b.token_ids[: len(tokens)] == tokens
    assert b.num_tokens == len(tokens) + 1, "the step that computes it again samples its next token"
    drain(scheduler, model)
    assert b.output_token_ids == continuation([2] * 6, 9)
    assert_idle(scheduler)


def test_a_preempted_sequence_hits_its_own_blocks_when_it_resumes() -> None:
    scheduler, (a, b), model = preempted()
    scheduler.finish(a, "abort")
    plan = run_step(scheduler, model)
    [(row, cached, new)] = runs_of(plan)
    assert row == b.row
    assert cached == 4, "the older sequence took the tail, which is worth less than the head"
    assert cached + new + 1 == b.num_tokens
    assert b.num_cached_tokens == 0, "what it found at first, not what it found again"


def test_twins_that_are_preempted_schedule_exactly_what_is_not_cached() -> None:
    scheduler = make_scheduler(num_blocks=5, max_model_len=20)
    model = ToyModel()
    twins = [make_sequence(i, [3] * 9, max_tokens=11) for i in range(2)]
    for seq in twins:
        scheduler.add(seq)
    while scheduler.has_unfinished:
        before = {seq.seq_id: seq.num_tokens for seq in twins}
        plan = scheduler.schedule()
        for seq_id, (_, start, count) in zip(members(scheduler, plan), runs_of(plan), strict=True):
            assert start + count == before[seq_id]
            assert count >= 1
        scheduler.update(plan, model.execute(plan))
        scheduler.check()
    assert scheduler.num_preemptions > 0
    assert [seq.output_token_ids for seq in twins] == [continuation([3] * 9, 11)] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_admitted_in_a_step_that_preempts(policy: str) -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=24, max_num_seqs=3, policy=policy)
    add(scheduler, 6, 6, 6, 1, 1, max_tokens=15)
    while scheduler.has_unfinished:
        count, running = scheduler.num_preemptions, set(ids(*scheduler.running))
        plan = scheduler.schedule()
        if scheduler.num_preemptions > count:
            assert is_decode(plan)
            assert set(members(scheduler, plan)) <= running
            assert plan.started == []
        scheduler.update(plan, answer(plan))
        scheduler.check()
    assert scheduler.num_preemptions > 0


def test_logprobs_and_max_tokens_count_each_token_once_across_preemptions() -> None:
    scheduler = make_scheduler(num_blocks=5, max_model_len=20)
    seqs = add(scheduler, 5, 5, 5, max_tokens=14)
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        ends = [end for end, _ in samples_of(plan)]
        entries = {i: {token: TokenLogprob(-float(token), 1)} for i, token in enumerate(ends)}
        scheduler.update(plan, StepResult(ends, entries))
    assert sum(seq.num_preemptions for seq in seqs) == scheduler.num_preemptions >= 2
    for seq in seqs:
        assert seq.output_token_ids == list(range(5, 19))
        assert [list(entry) for entry in seq.logprobs] == [[token] for token in range(5, 19)]


@pytest.mark.parametrize("options", [{"num_blocks": 7, "max_model_len": 20}, {"budget": 4}, {"max_num_seqs": 1}])
def test_the_address_of_randomness_depends_on_no_schedule(options: dict[str, int]) -> None:
    """Each token is sampled once, under the same seed and position, whatever chunks and preemptions there are."""

    def addresses(**options: int) -> tuple[list[tuple[int, int]], int]:
        scheduler = make_scheduler(**options)
        for seq_id in range(4):
            scheduler.add(Sequence(seq_id, [seq_id] * 7, SamplingParams(max_tokens=11), seed=seq_id))
        seeds: dict[int, int] = {}  # of each row
        sampled = []
        for plan in drain(scheduler, ToyModel()):
            seeds.update((start.row, start.sampling.seed) for start in plan.started)
            sampled += [(seeds[row], end) for end, row in samples_of(plan)]
        return sorted(sampled), scheduler.num_preemptions

    rows, num_preemptions = addresses(**options)
    assert rows == addresses()[0]
    assert len(rows) == 44
    assert (num_preemptions > 0) == ("num_blocks" in options)


def test_the_block_table_of_a_running_sequence_only_grows() -> None:
    scheduler = make_scheduler(num_blocks=9, max_model_len=20, budget=5)
    model = ToyModel()
    for seq_id in range(5):
        scheduler.add(make_sequence(seq_id, [7] * (6 + seq_id), max_tokens=10))
    tables: dict[tuple[int, int], list[int]] = {}
    while scheduler.has_unfinished:
        run_step(scheduler, model)
        for seq in scheduler.running:
            life = seq.seq_id, seq.num_preemptions
            assert seq.block_tables[0][: len(tables.get(life, []))] == tables.get(life, [])
            tables[life] = list(seq.block_tables[0])
    assert scheduler.num_preemptions > 0


def test_bans_of_min_tokens_survive_a_preemption() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    a, b = make_sequence(0, [1] * 6, max_tokens=9), make_sequence(1, [2] * 6, eos=[5], min_tokens=6, max_tokens=9)
    scheduler.add(a)
    scheduler.add(b)
    started = []
    while scheduler.has_unfinished:
        started += [start.sampling for start in step(scheduler).started if start.token_ids[0] == 2]
    assert b.num_preemptions > 0
    assert started == [b.sampling] * (1 + b.num_preemptions)
    assert (b.sampling.stop_token_ids, b.sampling.num_prompt_tokens) == ((5,), 6), (
        "it counts from there, not from the restart"
    )


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("budget", [4, 5, 64])
@pytest.mark.parametrize("policy", POLICIES)
def test_output_is_the_same_with_and_without_preemption(length: int, budget: int, policy: str) -> None:
    scheduler = make_scheduler(num_blocks=7, max_model_len=20, budget=budget, policy=policy)
    seqs = add(scheduler, *[length] * 4, max_tokens=11)
    prompts = [list(seq.token_ids) for seq in seqs]
    drain(scheduler, ToyModel())
    assert scheduler.num_preemptions > 0
    assert [seq.output_token_ids for seq in seqs] == [continuation(prompt, 11) for prompt in prompts]
    assert_idle(scheduler)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_oldest_sequence_moves_in_every_step_and_is_never_preempted(policy: str) -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=24, policy=policy)
    seqs = add(scheduler, *[3] * 8, max_tokens=20)
    while scheduler.has_unfinished:
        oldest = next(seq for seq in seqs if not seq.finished)
        preemptions = oldest.num_preemptions
        plan = scheduler.schedule()
        who = members(scheduler, plan)
        assert oldest.seq_id in who or (policy == PREFILL_FIRST and is_prefill(plan))
        assert oldest.num_preemptions == preemptions
        scheduler.update(plan, answer(plan))
        scheduler.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_storm_of_requests_on_a_tiny_pool_ends_with_few_preemptions(policy: str) -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=24, budget=10, policy=policy)
    draw = random.Random(0)
    wanted = {}
    for seq_id in range(200):
        seq = make_sequence(seq_id, [seq_id] * draw.randint(1, 12), max_tokens=draw.randint(1, 10))
        wanted[seq_id] = (seq, continuation(seq.token_ids, seq.params.max_tokens or 0))
        scheduler.add(seq)
    drain(scheduler, ToyModel(), limit=3000)
    assert all(seq.output_token_ids == tokens for seq, tokens in wanted.values())
    assert 0 < scheduler.num_preemptions < 200, "fewer than one preemption for each request"
    assert_idle(scheduler)


def test_abort_of_a_preempted_sequence() -> None:
    scheduler, (_, b), _ = preempted()
    scheduler.finish(b, "abort")
    scheduler.check()
    assert not scheduler.waiting
