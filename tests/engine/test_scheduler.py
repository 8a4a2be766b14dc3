"""Who runs, with how many tokens, and how a sequence ends."""

from __future__ import annotations

import numpy as np
import pytest

from nanoengine.engine.messages import Chunk, Started
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
    new_tokens,
    ran,
    run_step,
    runs_of,
    sampled_rows,
    step,
)

# ---- making batches


def test_nothing_to_do_gives_an_empty_plan() -> None:
    scheduler = make_scheduler()
    assert not scheduler.schedule()
    assert not scheduler.has_unfinished
    assert_idle(scheduler)


def test_a_plan_of_new_sequences_says_all_about_them() -> None:
    scheduler = make_scheduler()
    a, b = add(scheduler, 3, 5)
    plan = scheduler.schedule()
    assert is_prefill(plan)
    assert [a.row, b.row] == [0, 1]
    assert plan.started == [
        Started(0, [10 * a.seq_id + 1] * 3, ([1],), a.sampling),
        Started(1, [10 * b.seq_id + 1] * 5, ([2, 3],), b.sampling),
    ]
    assert plan.chunks == [Chunk(0, 0, 3, (0,)), Chunk(1, 0, 5, (1,))]
    assert (plan.tables, plan.ended, plan.masks, plan.transfers) == ([], [], [], [])
    assert (plan.num_new_tokens, plan.num_samples) == (8, 2)


def test_what_a_plan_says_does_not_change_with_the_sequence() -> None:
    scheduler = make_scheduler()
    [seq] = add(scheduler, 3)
    plan = step(scheduler)
    while scheduler.has_unfinished:
        step(scheduler)
    assert seq.num_output_tokens > 4
    assert plan.started[0].token_ids == [10 * seq.seq_id + 1] * 3
    assert plan.started[0].tables == ([1],)


def test_a_decode_plan_has_the_row_and_the_length_of_each_running_sequence() -> None:
    scheduler = make_scheduler()
    a, b = add(scheduler, 3, 5)
    step(scheduler, token=42)
    plan = scheduler.schedule()
    assert is_decode(plan)
    assert plan.decodes.rows.tolist() == [a.row, b.row]
    assert plan.decodes.num_computed.tolist() == [3, 5]
    assert plan.decodes.rows.dtype == plan.decodes.num_computed.dtype == np.int32
    assert (plan.num_new_tokens, plan.num_samples) == (2, 2)
    assert (plan.started, plan.ended) == ([], []), "the executor has their last tokens: it sampled them"


def test_first_come_first_served() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    a, b, c, d = add(scheduler, 2, 2, 2, 2, max_tokens=1)
    assert ran(scheduler) == ids(a, b)
    assert ran(scheduler) == ids(c, d)


def test_a_short_request_does_not_overtake_one_that_does_not_fit() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    a, big, small = add(scheduler, 9, 9, 1)
    assert ran(scheduler) == ids(a)
    assert ran(scheduler) == ids(a), "the running one goes on while the big one waits for blocks"
    assert list(scheduler.waiting) == [big, small]


def test_max_num_seqs_bounds_the_running_sequences() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    add(scheduler, *[2] * 5, max_tokens=4)
    while scheduler.has_unfinished:
        assert len(runs_of(step(scheduler))) <= 3


def test_the_budget_bounds_the_running_sequences_too() -> None:
    scheduler = make_scheduler(max_num_seqs=8, budget=3)
    add(scheduler, *[1] * 6, max_tokens=4)
    while scheduler.has_unfinished:
        assert step(scheduler).num_new_tokens <= 3


def test_the_last_prompt_of_a_step_is_cut_to_the_budget() -> None:
    scheduler = make_scheduler(budget=8)
    a, b = add(scheduler, 6, 6)
    plan = step(scheduler)
    assert new_tokens(plan) == [6, 2]
    assert sampled_rows(plan) == [a.row]
    assert (a.num_output_tokens, b.num_output_tokens) == (1, 0)
    plan = step(scheduler)
    assert is_prefill(plan)
    assert plan.chunks == [Chunk(b.row, 2, 4, (b.row,))]
    assert plan.started == [], "the executor has its tokens"
    assert b.num_output_tokens == 1


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7, 12, 13])
def test_only_the_last_chunk_of_a_prompt_samples_a_token(budget: int) -> None:
    scheduler = make_scheduler(budget=budget)
    [seq] = add(scheduler, 13, max_tokens=1)
    computed = 0
    while scheduler.has_unfinished:
        plan = step(scheduler)
        [chunk] = plan.chunks
        assert chunk.num_computed == computed
        assert chunk.num_new <= budget
        computed += chunk.num_new
        assert plan.num_samples == len(chunk.samples) == (computed == 13)
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
    assert (is_prefill(step(scheduler)), a.num_output_tokens) == (True, 1)
    assert ran(scheduler) == ids(a, b)


def test_a_started_prompt_is_finished_before_others_are_admitted() -> None:
    scheduler = make_scheduler(budget=4)
    a, b = add(scheduler, 10, 3)
    assert ran(scheduler) == ids(a)
    assert ran(scheduler) == ids(a)
    plan = scheduler.schedule()
    assert members(scheduler, plan) == ids(a, b)
    assert new_tokens(plan) == [2, 2]


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


def test_results_are_taken_in_the_order_of_the_plans() -> None:
    scheduler = make_scheduler()
    add(scheduler, 3)
    scheduler.schedule()
    second = scheduler.schedule()
    with pytest.raises(AssertionError, match="in the order of the plans"):
        scheduler.update(second, answer(second))


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


def test_the_executor_knows_which_stop_tokens_min_tokens_bans_and_from_where_it_counts() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, [1, 2, 3], eos=[5], stop_token_ids=[9], min_tokens=2))
    [start] = step(scheduler).started
    assert set(start.sampling.stop_token_ids) == {5, 9}
    assert start.sampling.params.min_tokens == 2
    assert start.sampling.num_prompt_tokens == 3


def test_min_tokens_does_not_ban_an_ignored_end_of_text() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, [1, 2, 3], eos=[5], min_tokens=2, ignore_eos=True))
    assert step(scheduler).started[0].sampling.stop_token_ids == ()


def test_without_min_tokens_nothing_is_banned() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, [1, 2, 3], eos=[5], stop_token_ids=[9]))
    assert step(scheduler).started[0].sampling.stop_token_ids == ()


# ---- aborts


def test_abort_of_a_waiting_sequence() -> None:
    scheduler = make_scheduler()
    a, b = add(scheduler, 3, 3)
    scheduler.finish(a, "abort")
    assert ran(scheduler) == ids(b)
    assert a.finish_reason == "abort"


def test_abort_between_two_chunks() -> None:
    scheduler = make_scheduler(budget=4)
    [seq] = add(scheduler, 10)
    step(scheduler)
    scheduler.finish(seq, "abort")
    assert seq.block_tables == []
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
    plan = scheduler.schedule()
    scheduler.finish(a, "abort")
    assert scheduler.update(plan, answer(plan)) == ([b], [7])
    assert a.output_token_ids == []
    scheduler.check()


def test_abort_of_a_finished_sequence_changes_nothing() -> None:
    scheduler = make_scheduler()
    [seq] = add(scheduler, 3, max_tokens=1)
    step(scheduler)
    scheduler.finish(seq, "abort")
    assert seq.finish_reason == "length"
    assert_idle(scheduler)


# ---- sharing


def test_equal_prompts_in_one_step_share_blocks_and_compute_them_once() -> None:
    scheduler = make_scheduler()
    model = ToyModel()
    prompt = list(range(10))
    seqs = [make_sequence(i, prompt, max_tokens=4) for i in range(3)]
    for seq in seqs:
        scheduler.add(seq)
    plan = run_step(scheduler, model)
    assert runs_of(plan) == [(0, 0, 10), (1, 8, 2), (2, 8, 2)]
    assert seqs[0].block_tables[0][:2] == seqs[1].block_tables[0][:2] == seqs[2].block_tables[0][:2]
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
    assert [chunk.num_computed for chunk in step(scheduler).chunks] == [0, 8]


def test_cached_tokens_do_not_count_against_the_budget() -> None:
    scheduler = make_scheduler(budget=10)
    model = ToyModel()
    scheduler.add(make_sequence(0, [1] * 9, max_tokens=1))
    drain(scheduler, model)
    for seq_id in (1, 2, 3):
        scheduler.add(make_sequence(seq_id, [1] * 9, max_tokens=1))
    assert members(scheduler, scheduler.schedule()) == [1, 2, 3]
