from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.engine.messages import Phase, SampledBatch, ScheduledBatch
from nanoengine.engine.scheduler import Scheduler
from nanoengine.engine.sequence import Sequence, Status
from nanoengine.outputs import TokenLogprob
from tests.engine.toys import (
    FAST,
    ToyModel,
    answer,
    continuation,
    drain,
    make_scheduler,
    make_sequence,
    run_step,
)

seq_ids = itertools.count()


def add(scheduler: Scheduler, *lengths: int, **params: object) -> list[Sequence]:
    """Queue sequences with these prompt lengths; their prompts share nothing."""
    seqs = []
    for length, seq_id in zip(lengths, seq_ids, strict=False):
        seqs.append(make_sequence(seq_id, [10 * seq_id + 1] * length, **params))
        scheduler.add(seqs[-1])
    return seqs


def ids(*seqs: Sequence) -> list[int]:
    return [seq.seq_id for seq in seqs]


def step(scheduler: Scheduler, token: int = 7) -> ScheduledBatch:
    """One step that samples the same token everywhere."""
    batch = scheduler.schedule()
    scheduler.check()
    scheduler.update(batch, answer(batch, token))
    scheduler.check()
    return batch


def assert_idle(scheduler: Scheduler) -> None:
    """Nothing is left: no sequence, no block in use."""
    scheduler.check()
    assert not scheduler.has_unfinished
    assert scheduler.block_manager.pool.num_free == scheduler.block_manager.pool.num_blocks
    assert not scheduler.schedule()


# ---- making batches


def test_nothing_to_do_gives_an_empty_batch() -> None:
    scheduler = make_scheduler()
    assert len(scheduler.schedule()) == 0
    assert not scheduler.has_unfinished
    assert_idle(scheduler)


def test_a_batch_lists_tokens_lengths_and_blocks_of_each_sequence() -> None:
    scheduler = make_scheduler()
    a, b = add(scheduler, 3, 5)
    batch = scheduler.schedule()
    assert batch.phase is Phase.PREFILL
    assert batch.seq_ids == ids(a, b)
    assert batch.token_ids == a.token_ids + b.token_ids
    assert batch.num_computed_tokens == [0, 0]
    assert batch.num_new_tokens == [3, 5]
    assert batch.block_tables == [[1], [2, 3]]
    assert [row.row for row in batch.sampling] == [0, 1]


def test_a_decode_batch_has_the_last_token_of_each_running_sequence() -> None:
    scheduler = make_scheduler()
    a, b = add(scheduler, 3, 5)
    step(scheduler, token=42)
    batch = scheduler.schedule()
    assert batch.phase is Phase.DECODE
    assert batch.token_ids == [42, 42]
    assert batch.num_computed_tokens == [3, 5]
    assert batch.num_new_tokens == [1, 1]
    assert [row.seed for row in batch.sampling] == [a.seed, b.seed]


def test_first_come_first_served() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    a, b, c, d = add(scheduler, 2, 2, 2, 2, max_tokens=1)
    assert step(scheduler).seq_ids == ids(a, b)
    assert step(scheduler).seq_ids == ids(c, d)


def test_a_short_request_does_not_overtake_one_that_does_not_fit() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    a, big, small = add(scheduler, 9, 9, 1)
    assert step(scheduler).seq_ids == ids(a)
    assert step(scheduler).seq_ids == ids(a), "the running one goes on while the big one waits for blocks"
    assert list(scheduler.waiting) == [big, small]


def test_max_num_seqs_bounds_the_running_sequences() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    add(scheduler, *[2] * 5, max_tokens=4)
    while scheduler.has_unfinished:
        assert len(step(scheduler)) <= 3


def test_the_budget_bounds_the_running_sequences_too() -> None:
    scheduler = make_scheduler(max_num_seqs=8, budget=3)
    add(scheduler, *[1] * 6, max_tokens=4)
    while scheduler.has_unfinished:
        assert sum(step(scheduler).num_new_tokens) <= 3


def test_the_last_prompt_of_a_step_is_cut_to_the_budget() -> None:
    scheduler = make_scheduler(budget=8)
    a, b = add(scheduler, 6, 6)
    batch = step(scheduler)
    assert batch.num_new_tokens == [6, 2]
    assert [row.row for row in batch.sampling] == [0]
    assert (a.num_output_tokens, b.num_output_tokens) == (1, 0)
    batch = step(scheduler)
    assert (batch.phase, batch.seq_ids) == (Phase.PREFILL, ids(b))
    assert (batch.num_computed_tokens, batch.num_new_tokens) == ([2], [4])
    assert b.num_output_tokens == 1


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7, 12, 13])
def test_only_the_last_chunk_of_a_prompt_samples_a_token(budget: int) -> None:
    scheduler = make_scheduler(budget=budget)
    [seq] = add(scheduler, 13, max_tokens=1)
    computed = 0
    while scheduler.has_unfinished:
        batch = step(scheduler)
        assert batch.num_computed_tokens == [computed]
        assert batch.num_new_tokens[0] <= budget
        computed += batch.num_new_tokens[0]
        assert len(batch.sampling) == (computed == 13)
    assert computed == 13
    assert seq.num_output_tokens == 1
    assert_idle(scheduler)


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 16])
def test_chunks_and_one_pass_generate_the_same_tokens(budget: int) -> None:
    scheduler = make_scheduler(budget=budget)
    [seq] = add(scheduler, 13, max_tokens=6)
    drain(scheduler, ToyModel())
    assert seq.output_token_ids == continuation(seq.token_ids[:13], 6)


def test_new_prompts_go_before_decode() -> None:
    scheduler = make_scheduler()
    [a] = add(scheduler, 3)
    step(scheduler)
    [b] = add(scheduler, 3)
    assert (step(scheduler).phase, a.num_output_tokens) == (Phase.PREFILL, 1)
    assert step(scheduler).seq_ids == ids(a, b)


def test_a_started_prompt_is_finished_before_others_are_admitted() -> None:
    scheduler = make_scheduler(budget=4)
    a, b = add(scheduler, 10, 3)
    assert step(scheduler).seq_ids == ids(a)
    assert step(scheduler).seq_ids == ids(a)
    batch = step(scheduler)
    assert batch.seq_ids == ids(a, b)
    assert batch.num_new_tokens == [2, 2]


def test_a_chunk_that_leaves_one_prompt_token_still_samples_once() -> None:
    scheduler = make_scheduler(budget=4)
    model = ToyModel()
    a, b = add(scheduler, 5, 3, max_tokens=3)
    drain(scheduler, model)
    assert a.output_token_ids == continuation(a.token_ids[:5], 3)
    assert b.output_token_ids == continuation(b.token_ids[:3], 3)


def test_a_prompt_with_one_token_left_is_not_overtaken_by_newer_ones() -> None:
    scheduler = make_scheduler(budget=4)
    [a] = add(scheduler, 5)
    step(scheduler)
    [b] = add(scheduler, 3)
    step(scheduler)
    assert a.num_output_tokens == 1
    assert b.num_computed_tokens == 3


def test_one_batch_at_a_time() -> None:
    scheduler = make_scheduler()
    add(scheduler, 3)
    scheduler.schedule()
    with pytest.raises(AssertionError, match="one batch at a time"):
        scheduler.schedule()


def test_a_pool_that_cannot_hold_one_sequence_is_impossible() -> None:
    with pytest.raises(AssertionError, match="holds one sequence"):
        make_scheduler(num_blocks=3, block_size=4, max_model_len=13)
    make_scheduler(num_blocks=3, block_size=4, max_model_len=12)


@pytest.mark.parametrize("length", [0, 16, 17])
def test_a_prompt_without_room_for_a_token_is_impossible(length: int) -> None:
    scheduler = make_scheduler(max_model_len=16)
    with pytest.raises(AssertionError):
        scheduler.add(make_sequence(0, [1] * length))
    assert not scheduler.has_unfinished


# ---- the ends of a sequence


def test_end_of_text_ends_a_sequence() -> None:
    scheduler = make_scheduler()
    seq = make_sequence(0, [1, 2, 3], eos=[5])
    scheduler.add(seq)
    step(scheduler, token=4)
    step(scheduler, token=5)
    assert (seq.finish_reason, seq.stop_reason, seq.output_token_ids) == ("stop", None, [4, 5])
    assert_idle(scheduler)


def test_a_stop_token_ends_a_sequence_and_is_named() -> None:
    scheduler = make_scheduler()
    seq = make_sequence(0, [1, 2, 3], eos=[5], stop_token_ids=[9])
    scheduler.add(seq)
    step(scheduler, token=9)
    assert (seq.finish_reason, seq.stop_reason) == ("stop", 9)
    assert_idle(scheduler)


def test_end_of_text_can_be_ignored_but_a_stop_token_cannot() -> None:
    scheduler = make_scheduler()
    seq = make_sequence(0, [1, 2, 3], eos=[5], stop_token_ids=[9], ignore_eos=True)
    scheduler.add(seq)
    step(scheduler, token=5)
    assert not seq.finished
    step(scheduler, token=9)
    assert seq.stop_reason == 9


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_ends_a_sequence(max_tokens: int) -> None:
    scheduler = make_scheduler()
    [seq] = add(scheduler, 3, max_tokens=max_tokens)
    drain(scheduler, ToyModel())
    assert (seq.finish_reason, seq.num_output_tokens) == ("length", max_tokens)
    assert_idle(scheduler)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 14, 15])
@pytest.mark.parametrize("max_tokens", [None, 100])
def test_the_models_length_ends_a_sequence_in_a_pool_that_just_holds_it(length: int, max_tokens: int | None) -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    [seq] = add(scheduler, length, max_tokens=max_tokens)
    drain(scheduler, ToyModel())
    assert (seq.finish_reason, seq.num_tokens) == ("length", 16)
    assert_idle(scheduler)


def test_a_stop_on_the_last_allowed_token_counts_as_stop() -> None:
    scheduler = make_scheduler()
    seq = make_sequence(0, [1], eos=[5], max_tokens=1)
    scheduler.add(seq)
    step(scheduler, token=5)
    assert seq.finish_reason == "stop"


def test_min_tokens_bans_all_stop_tokens_until_it_is_reached() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, [1, 2, 3], eos=[5], stop_token_ids=[9], min_tokens=2))
    banned = [set(step(scheduler).sampling[0].banned_token_ids) for _ in range(4)]
    assert banned == [{5, 9}, {5, 9}, set(), set()]


def test_min_tokens_does_not_ban_an_ignored_end_of_text() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, [1, 2, 3], eos=[5], min_tokens=2, ignore_eos=True))
    assert step(scheduler).sampling[0].banned_token_ids == ()


# ---- aborts


def test_abort_of_a_waiting_sequence() -> None:
    scheduler = make_scheduler()
    a, b = add(scheduler, 3, 3)
    scheduler.finish(a, "abort")
    assert step(scheduler).seq_ids == ids(b)
    assert a.finish_reason == "abort"


def test_abort_between_two_chunks() -> None:
    scheduler = make_scheduler(budget=4)
    [seq] = add(scheduler, 10)
    step(scheduler)
    scheduler.finish(seq, "abort")
    assert seq.block_table == []
    assert_idle(scheduler)


def test_a_prompt_aborted_between_chunks_serves_only_what_was_written() -> None:
    scheduler = make_scheduler(budget=6)
    model = ToyModel()
    prompt = list(range(20))
    first = make_sequence(0, prompt)
    scheduler.add(first)
    run_step(scheduler, model)
    scheduler.finish(first, "abort")
    second = make_sequence(1, prompt, max_tokens=4)
    scheduler.add(second)
    drain(scheduler, model)
    assert second.num_cached_tokens == 4
    assert second.output_token_ids == continuation(prompt, 4)


def test_abort_of_a_running_sequence_leaves_the_others_alone() -> None:
    scheduler = make_scheduler()
    model = ToyModel()
    a, b = add(scheduler, 5, 5, max_tokens=6)
    run_step(scheduler, model)
    scheduler.finish(a, "abort")
    drain(scheduler, model)
    assert (a.finish_reason, a.num_output_tokens) == ("abort", 1)
    assert b.output_token_ids == continuation(b.token_ids[:5], 6)
    assert_idle(scheduler)


def test_abort_while_the_step_runs_drops_its_token() -> None:
    scheduler = make_scheduler()
    a, b = add(scheduler, 3, 3)
    batch = scheduler.schedule()
    scheduler.finish(a, "abort")
    assert scheduler.update(batch, answer(batch)) == [b]
    assert a.output_token_ids == []
    scheduler.check()


def test_abort_of_a_finished_sequence_changes_nothing() -> None:
    scheduler = make_scheduler()
    [seq] = add(scheduler, 3, max_tokens=1)
    step(scheduler)
    scheduler.finish(seq, "abort")
    assert seq.finish_reason == "length"
    assert_idle(scheduler)


def test_abort_of_a_preempted_sequence() -> None:
    scheduler, (_, b), _ = preempted()
    scheduler.finish(b, "abort")
    scheduler.check()
    assert not scheduler.waiting


# ---- preemption


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
        batch = step(scheduler)
    assert batch.seq_ids == ids(a)
    assert b.num_preemptions == 1


def test_preemption_frees_all_blocks_and_keeps_the_tokens() -> None:
    _, (_, b), _ = preempted()
    assert b.block_table == []
    assert b.num_computed_tokens == 0
    assert b.output_token_ids == continuation([2] * 6, 3)


def test_a_preempted_sequence_computes_prompt_and_output_again_and_goes_on() -> None:
    scheduler, (a, b), model = preempted()
    tokens = list(b.token_ids)
    while b.status is not Status.RUNNING:
        batch = run_step(scheduler, model)
    assert a.finished
    assert batch.phase is Phase.PREFILL
    assert sum(batch.num_computed_tokens) + sum(batch.num_new_tokens) == len(tokens)
    assert b.token_ids[: len(tokens)] == tokens
    assert b.num_tokens == len(tokens) + 1, "the step that computes it again samples its next token"
    drain(scheduler, model)
    assert b.output_token_ids == continuation([2] * 6, 9)
    assert_idle(scheduler)


def test_a_preempted_sequence_hits_its_own_blocks_when_it_resumes() -> None:
    scheduler, (a, b), model = preempted()
    scheduler.finish(a, "abort")
    batch = run_step(scheduler, model)
    assert batch.seq_ids == [1]
    [cached], [new] = batch.num_computed_tokens, batch.num_new_tokens
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
        batch = run_step(scheduler, model)
        for seq_id, start, count in zip(batch.seq_ids, batch.num_computed_tokens, batch.num_new_tokens, strict=True):
            assert start + count == before[seq_id]
            assert count >= 1
    assert scheduler.num_preemptions > 0
    assert [seq.output_token_ids for seq in twins] == [continuation([3] * 9, 11)] * 2


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=24, max_num_seqs=3)
    add(scheduler, 6, 6, 6, 1, 1, max_tokens=15)
    while scheduler.has_unfinished:
        count, running = scheduler.num_preemptions, set(ids(*scheduler.running))
        batch = step(scheduler)
        if scheduler.num_preemptions > count:
            assert batch.phase is Phase.DECODE
            assert set(batch.seq_ids) <= running
    assert scheduler.num_preemptions > 0


def test_logprobs_and_max_tokens_count_each_token_once_across_preemptions() -> None:
    scheduler = make_scheduler(num_blocks=5, max_model_len=20)
    seqs = add(scheduler, 5, 5, 5, max_tokens=14)
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        rows = [batch.num_computed_tokens[r.row] + batch.num_new_tokens[r.row] for r in batch.sampling]
        sampled = SampledBatch(rows, [{token: TokenLogprob(-float(token), 1)} for token in rows])
        scheduler.update(batch, sampled)
    assert sum(seq.num_preemptions for seq in seqs) == scheduler.num_preemptions >= 2
    for seq in seqs:
        assert seq.output_token_ids == list(range(5, 19))
        assert [list(entry) for entry in seq.logprobs] == [[token] for token in range(5, 19)]


@pytest.mark.parametrize("options", [{"num_blocks": 7, "max_model_len": 20}, {"budget": 4}, {"max_num_seqs": 1}])
def test_the_address_of_randomness_depends_on_no_schedule(options: dict[str, int]) -> None:
    """Each token is sampled once, under the same seed and position, whatever chunks and preemptions there are."""

    def addresses(**options: int) -> tuple[list[tuple[int, int, int]], int]:
        scheduler = make_scheduler(**options)
        for seq_id in range(4):
            scheduler.add(make_sequence(seq_id, [seq_id] * 7, max_tokens=11))
        batches = drain(scheduler, ToyModel())
        rows = [
            (batch.seq_ids[each.row], each.seed, batch.num_computed_tokens[each.row] + batch.num_new_tokens[each.row])
            for batch in batches
            for each in batch.sampling
        ]
        return sorted(rows), scheduler.num_preemptions

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
            assert seq.block_table[: len(tables.get(life, []))] == tables.get(life, [])
            tables[life] = list(seq.block_table)
    assert scheduler.num_preemptions > 0


def test_bans_of_min_tokens_survive_a_preemption() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    a, b = make_sequence(0, [1] * 6, max_tokens=9), make_sequence(1, [2] * 6, eos=[5], min_tokens=6, max_tokens=9)
    scheduler.add(a)
    scheduler.add(b)
    bans: dict[int, bool] = {}
    while scheduler.has_unfinished:
        outputs = b.num_output_tokens
        batch = step(scheduler)
        for row in batch.sampling:
            if batch.seq_ids[row.row] == 1:
                bans[outputs] = bool(row.banned_token_ids)
    assert b.num_preemptions > 0
    assert bans == {count: count < 6 for count in range(9)}


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("budget", [4, 5, 64])
def test_output_is_the_same_with_and_without_preemption(length: int, budget: int) -> None:
    scheduler = make_scheduler(num_blocks=7, max_model_len=20, budget=budget)
    seqs = add(scheduler, *[length] * 4, max_tokens=11)
    prompts = [list(seq.token_ids) for seq in seqs]
    drain(scheduler, ToyModel())
    assert scheduler.num_preemptions > 0
    assert [seq.output_token_ids for seq in seqs] == [continuation(prompt, 11) for prompt in prompts]
    assert_idle(scheduler)


def test_the_oldest_sequence_moves_in_every_step_and_is_never_preempted() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=24)
    seqs = add(scheduler, *[3] * 8, max_tokens=20)
    while scheduler.has_unfinished:
        oldest = next(seq for seq in seqs if not seq.finished)
        preemptions = oldest.num_preemptions
        batch = step(scheduler)
        assert batch.phase is Phase.PREFILL or oldest.seq_id in batch.seq_ids
        assert oldest.num_preemptions == preemptions


def test_a_storm_of_requests_on_a_tiny_pool_ends_with_few_preemptions() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=24, budget=10)
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


# ---- failing steps


def fail_once(scheduler: Scheduler, model: ToyModel) -> list[Sequence]:
    """A step that raises, with garbage left in the blocks that it was to write."""
    batch = scheduler.schedule()
    model.fail_if = lambda _: True
    with pytest.raises(RuntimeError):
        model.execute(batch)
    model.fail_if = lambda _: False
    failed = scheduler.fail(batch)
    scheduler.check()
    return failed


def test_a_failed_step_ends_its_sequences_and_frees_their_blocks() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    a, b, c = add(scheduler, 9, 9, 9)
    assert fail_once(scheduler, ToyModel()) == [a, b]
    assert [seq.finish_reason for seq in (a, b, c)] == ["error", "error", None]
    assert scheduler.block_manager.pool.num_free == scheduler.block_manager.pool.num_blocks
    assert step(scheduler).seq_ids == ids(c)


def test_what_a_failed_step_published_is_never_hit() -> None:
    scheduler = make_scheduler()
    prompt = list(range(13))
    model = ToyModel()
    scheduler.add(make_sequence(0, prompt))
    fail_once(scheduler, model)
    again = make_sequence(1, prompt, max_tokens=3)
    scheduler.add(again)
    drain(scheduler, model)
    assert again.num_cached_tokens == 0
    assert again.output_token_ids == continuation(prompt, 3)


def test_a_failed_chunk_keeps_what_earlier_steps_wrote() -> None:
    scheduler = make_scheduler(budget=8)
    model = ToyModel()
    prompt = list(range(21))
    scheduler.add(make_sequence(0, prompt))
    run_step(scheduler, model)
    fail_once(scheduler, model)
    again = make_sequence(1, prompt, max_tokens=3)
    scheduler.add(again)
    drain(scheduler, model)
    assert again.num_cached_tokens == 8
    assert again.output_token_ids == continuation(prompt, 3)


def test_a_failed_decode_step_withdraws_the_block_that_it_completed() -> None:
    scheduler = make_scheduler()
    model = ToyModel()
    scheduler.add(make_sequence(0, [1, 2, 3]))
    run_step(scheduler, model)
    [token] = scheduler.running[0].output_token_ids
    fail_once(scheduler, model)
    again = make_sequence(1, [1, 2, 3, token, 5])
    scheduler.add(again)
    run_step(scheduler, model)
    assert again.num_cached_tokens == 0


def test_a_step_that_fails_after_one_that_went_well_withdraws_only_its_own() -> None:
    scheduler = make_scheduler()
    model = ToyModel()
    done = make_sequence(0, [1] * 9, max_tokens=1)
    scheduler.add(done)
    run_step(scheduler, model)
    scheduler.add(make_sequence(1, [2] * 9))
    fail_once(scheduler, model)
    again = make_sequence(2, [1] * 9)
    scheduler.add(again)
    run_step(scheduler, model)
    assert again.num_cached_tokens == 8


def test_a_sequence_aborted_in_a_step_that_then_fails_stays_aborted() -> None:
    scheduler = make_scheduler()
    a, b = add(scheduler, 5, 5)
    batch = scheduler.schedule()
    scheduler.finish(a, "abort")
    assert scheduler.fail(batch) == [b]
    assert (a.finish_reason, b.finish_reason) == ("abort", "error")
    assert_idle(scheduler)


# ---- sharing


def test_equal_prompts_in_one_step_share_blocks_and_compute_them_once() -> None:
    scheduler = make_scheduler()
    model = ToyModel()
    prompt = list(range(10))
    seqs = [make_sequence(i, prompt, max_tokens=4) for i in range(3)]
    for seq in seqs:
        scheduler.add(seq)
    batch = run_step(scheduler, model)
    assert batch.num_computed_tokens == [0, 8, 8]
    assert batch.num_new_tokens == [10, 2, 2]
    assert seqs[0].block_table[:2] == seqs[1].block_table[:2] == seqs[2].block_table[:2]
    drain(scheduler, model)
    assert all(seq.output_token_ids == continuation(prompt, 4) for seq in seqs)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_a_prompt_seen_before_gives_the_same_tokens(length: int) -> None:
    scheduler = make_scheduler()
    model = ToyModel()
    prompt = list(range(length))
    for seq_id in range(2):
        seq = make_sequence(seq_id, prompt, max_tokens=6)
        scheduler.add(seq)
        drain(scheduler, model)
        assert seq.output_token_ids == continuation(prompt, 6)
    assert seq.num_cached_tokens == (length - 1) // 4 * 4


def test_sampling_params_play_no_part_in_sharing() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, [1] * 9, temperature=0.0))
    scheduler.add(make_sequence(1, [1] * 9, temperature=1.0, top_k=3))
    assert step(scheduler).num_computed_tokens == [0, 8]


def test_cached_tokens_do_not_count_against_the_budget() -> None:
    scheduler = make_scheduler(budget=10)
    model = ToyModel()
    scheduler.add(make_sequence(0, [1] * 9, max_tokens=1))
    drain(scheduler, model)
    for seq_id in (1, 2, 3):
        scheduler.add(make_sequence(seq_id, [1] * 9, max_tokens=1))
    assert run_step(scheduler, model).seq_ids == [1, 2, 3]


# ---- the checker, and everything at once


def lose_a_block(scheduler: Scheduler) -> None:
    scheduler.running[0].block_table.pop()


def swap_running(scheduler: Scheduler) -> None:
    scheduler.running.reverse()


def wrong_status(scheduler: Scheduler) -> None:
    scheduler.running[0].status = Status.WAITING


def waiting_with_progress(scheduler: Scheduler) -> None:
    scheduler.waiting[0].num_computed_tokens = 1


def computed_too_far(scheduler: Scheduler) -> None:
    scheduler.running[0].num_computed_tokens += 5


@pytest.mark.parametrize(
    "corrupt",
    [lose_a_block, swap_running, wrong_status, waiting_with_progress, computed_too_far],
    ids=lambda f: f.__name__,
)
def test_check_notices_corruption(corrupt: Callable[[Scheduler], None]) -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, 5, 5, 5)
    step(scheduler)
    broken = copy.deepcopy(scheduler)
    corrupt(broken)
    with pytest.raises(AssertionError):
        broken.check()
    scheduler.check()


requests = st.lists(
    st.tuples(st.integers(1, 14), st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=10
)  # prompt length, max_tokens, which of a few prompt families


@settings(FAST, max_examples=300)
@given(
    requests=requests,
    num_blocks=st.integers(5, 12),
    block_size=st.integers(1, 5),
    budget=st.integers(1, 24),
    max_num_seqs=st.integers(1, 6),
    caching=st.booleans(),
    events=st.dictionaries(
        st.integers(0, 60), st.tuples(st.sampled_from(["abort", "fail"]), st.integers(0, 9)), max_size=6
    ),
)
def test_any_mix_of_requests_aborts_and_failures_ends_with_the_right_tokens(
    requests: list[tuple[int, int, int]],
    num_blocks: int,
    block_size: int,
    budget: int,
    max_num_seqs: int,
    caching: bool,
    events: dict[int, tuple[str, int]],
) -> None:
    max_model_len = max(2, min(num_blocks * block_size, 20))
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        budget=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        caching=caching,
    )
    model = ToyModel(block_size)
    seqs = []
    for seq_id, (length, max_tokens, family) in enumerate(requests):
        prompt = [family] * min(length, max_model_len - 1)
        seqs.append(make_sequence(seq_id, prompt, max_tokens=max_tokens))
    late = seqs[len(seqs) // 2 :]
    for seq in seqs[: len(seqs) // 2]:
        scheduler.add(seq)
    for number in range(4000):
        if late and number % 3 == 0:
            scheduler.add(late.pop(0))
        event, which = events.get(number, ("", 0))
        seq = seqs[which % len(seqs)]
        if event == "abort" and seq not in late:
            scheduler.finish(seq, "abort")
        batch = scheduler.schedule()
        scheduler.check()
        if not batch:
            assert not scheduler.has_unfinished
            if not late:
                break
            continue
        assert sum(batch.num_new_tokens) == len(batch.token_ids) <= budget
        assert len(batch) <= max_num_seqs
        assert min(batch.num_new_tokens) >= 1
        model.fail_if = lambda _, event=event: event == "fail"
        try:
            sampled = model.execute(batch)
        except RuntimeError:
            scheduler.fail(batch)
        else:
            scheduler.update(batch, sampled)
        scheduler.check()
    assert_idle(scheduler)
    for seq in seqs:
        whole = continuation(seq.token_ids[: seq.num_prompt_tokens], seq.params.max_tokens or 0)
        assert seq.output_token_ids == whole[: seq.num_output_tokens]
        if seq.finish_reason == "length":
            assert seq.num_output_tokens == len(whole) or seq.num_tokens == max_model_len
        else:
            assert seq.finish_reason in ("abort", "error")
