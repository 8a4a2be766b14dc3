"""Steps that fail, books that are wrong, and everything at once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.engine.scheduler import Scheduler
from nanoengine.engine.sequence import Sequence, Status
from tests.engine.toys import (
    FAST,
    ToyModel,
    add,
    assert_idle,
    continuation,
    drain,
    ids,
    make_scheduler,
    make_sequence,
    run_step,
    step,
)

# ---- failing steps


def fail_once(scheduler: Scheduler, model: ToyModel) -> list[Sequence]:
    """A step that raises, with garbage left in the blocks that it was to write."""
    batch = scheduler.schedule()
    model.fail_if = lambda _: True
    with pytest.raises(RuntimeError):
        model.execute(batch)
    model.fail_if = lambda _: False
    failed = scheduler.fail()
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
    scheduler.schedule()
    scheduler.finish(a, "abort")
    assert scheduler.fail() == [b]
    assert (a.finish_reason, b.finish_reason) == ("abort", "error")
    assert_idle(scheduler)


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
            scheduler.fail()
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
