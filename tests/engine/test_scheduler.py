"""Who runs, with how many tokens, and how a sequence ends."""

from __future__ import annotations

import pytest

from nanoengine.engine.messages import Phase
from tests.engine.toys import (
    ToyModel,
    add,
    answer,
    assert_idle,
    continuation,
    drain,
    ids,
    make_scheduler,
    make_sequence,
    run_step,
    step,
)

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
    assert batch.token_ids == [10 * a.seq_id + 1] * 3 + [10 * b.seq_id + 1] * 5
    assert batch.rows == batch.sampled_into == [a.row, b.row] == [0, 1]
    assert batch.num_computed_tokens == [0, 0]
    assert batch.num_new_tokens == [3, 5]
    assert batch.block_tables == [[1], [2, 3]]
    assert batch.sampled_rows == [0, 1]


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
    assert batch.sampled_rows == [0]
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


def test_results_are_taken_in_the_order_of_the_batches() -> None:
    scheduler = make_scheduler()
    add(scheduler, 3)
    scheduler.schedule()
    second = scheduler.schedule()
    with pytest.raises(AssertionError, match="in the order of the batches"):
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
