"""Steps that fail, books that are wrong, and everything at once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.engine.scheduler import POLICIES, Scheduler
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
    new_tokens,
    ran,
    run_step,
    runs_of,
    step,
)

# ---- failing steps


def fail_once(scheduler: Scheduler, model: ToyModel) -> list[Sequence]:
    """A step that raises, with garbage left in the blocks that it was to write."""
    plan = scheduler.schedule()
    model.fail_if = lambda _: True
    with pytest.raises(RuntimeError):
        model.execute(plan)
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
    assert ran(scheduler) == ids(c)


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


def test_who_gave_way_after_it_had_shared_what_was_not_written_samples_again() -> None:
    """Of three steps in flight the first fails, the second sampled from its blocks, and in the third that sequence gives way."""
    scheduler, model = make_scheduler(num_blocks=5, max_model_len=20), ToyModel()
    old, failing, sharing = (
        make_sequence(i, prompt, max_tokens=6) for i, prompt in enumerate(([5] * 3, [1] * 9, [1] * 9))
    )
    scheduler.add(old)
    for _ in range(2):
        run_step(scheduler, model)
    plans = []
    for seq in (failing, sharing):
        scheduler.add(seq)
        plans.append(scheduler.schedule())
        scheduler.check()
    assert sharing.block_tables[0][:2] == failing.block_tables[0][:2]
    plans.append(scheduler.schedule())
    scheduler.check()
    assert (sharing.status, sharing.num_preemptions, sharing.num_tokens) == (Status.WAITING, 1, 10)
    model.fail_if = lambda plan: plan is plans[0]
    with pytest.raises(RuntimeError):
        model.execute(plans[0])
    assert scheduler.fail() == [failing]
    scheduler.check()
    for plan in plans[1:]:
        scheduler.update(plan, model.execute(plan))
        scheduler.check()
    assert sharing.output_token_ids == [], "what it sampled followed from what was not written"
    drain(scheduler, model)
    assert sharing.output_token_ids == continuation([1] * 9, 6)
    assert old.output_token_ids == continuation([5] * 3, 6)
    assert_idle(scheduler)


# ---- the checker, and everything at once


def lose_a_block(scheduler: Scheduler) -> None:
    scheduler.running[0].block_tables[0].pop()


def swap_running(scheduler: Scheduler) -> None:
    scheduler.running.reverse()


def wrong_status(scheduler: Scheduler) -> None:
    scheduler.running[0].status = Status.WAITING


def waiting_with_progress(scheduler: Scheduler) -> None:
    scheduler.waiting[0].num_computed_tokens = 1


def computed_too_far(scheduler: Scheduler) -> None:
    scheduler.running[0]._offset += 5  # while it is decoded, its counts follow from a clock


def row_of_two(scheduler: Scheduler) -> None:
    scheduler.running[0].row = scheduler.running[1].row


def in_two_states(scheduler: Scheduler) -> None:
    scheduler.held.add(scheduler.running[0])


def more_tokens_than_are_on_their_way(scheduler: Scheduler) -> None:
    scheduler.running[0].token_ids.append(5)


@pytest.mark.parametrize(
    "corrupt",
    [
        lose_a_block,
        swap_running,
        wrong_status,
        waiting_with_progress,
        computed_too_far,
        row_of_two,
        in_two_states,
        more_tokens_than_are_on_their_way,
    ],
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
    st.tuples(
        st.integers(1, 14),
        st.integers(1, 12),
        st.integers(0, 2),
        st.sampled_from([0, 0, -3, 3]),
        st.sampled_from("aab"),
    ),
    min_size=1,
    max_size=10,
)  # prompt length, max_tokens, which of a few prompt families, priority, client


@settings(FAST, max_examples=300)
@given(
    requests=requests,
    num_blocks=st.integers(5, 12),
    block_size=st.integers(1, 5),
    budget=st.integers(1, 24),
    max_num_seqs=st.integers(1, 6),
    caching=st.booleans(),
    policy=st.sampled_from(POLICIES),
    max_chunk=st.sampled_from([None, 1, 3, 8]),
    max_client_share=st.sampled_from([0.01, 0.5, 1.0]),
    events=st.dictionaries(
        st.integers(0, 60), st.tuples(st.sampled_from(["abort", "fail"]), st.integers(0, 9)), max_size=6
    ),
)
def test_any_mix_of_requests_aborts_and_failures_ends_with_the_right_tokens(
    requests: list[tuple[int, int, int, int, str]],
    num_blocks: int,
    block_size: int,
    budget: int,
    max_num_seqs: int,
    caching: bool,
    policy: str,
    max_chunk: int | None,
    max_client_share: float,
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
        policy=policy,
        max_chunk=max_chunk,
        max_client_share=max_client_share,
    )
    model = ToyModel(block_size)
    seqs = []
    for seq_id, (length, max_tokens, family, priority, client) in enumerate(requests):
        prompt = [family] * min(length, max_model_len - 1)
        seqs.append(make_sequence(seq_id, prompt, max_tokens=max_tokens, priority=priority, client=client))
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
        plan = scheduler.schedule()
        scheduler.check()
        if not plan:
            assert not scheduler.has_unfinished
            if not late:
                break
            continue
        assert sum(new_tokens(plan)) == plan.num_new_tokens <= budget
        assert len(runs_of(plan)) <= max_num_seqs
        assert min(new_tokens(plan)) >= 1
        assert max(new_tokens(plan)) <= (max_chunk or budget)
        model.fail_if = lambda _, event=event: event == "fail"
        try:
            result = model.execute(plan)
        except RuntimeError:
            scheduler.fail()
        else:
            scheduler.update(plan, result)
        scheduler.check()
    assert_idle(scheduler)
    for seq in seqs:
        whole = continuation(seq.token_ids[: seq.num_prompt_tokens], seq.params.max_tokens or 0)
        assert seq.output_token_ids == whole[: seq.num_output_tokens]
        if seq.finish_reason == "length":
            assert seq.num_output_tokens == len(whole) or seq.num_tokens == max_model_len
        else:
            assert seq.finish_reason in ("abort", "error")
