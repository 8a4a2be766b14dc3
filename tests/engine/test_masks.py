"""Masks of the tokens that may be sampled: told when the row runs, again after a restart, and lifted."""

from __future__ import annotations

import pytest

from nanoengine.engine.scheduler import POLICIES
from tests.engine.toys import (
    ToyModel,
    add,
    add_family,
    drain,
    make_scheduler,
    make_sequence,
    run_step,
    samples_of,
    step,
)

ODD, EVEN = b"\xaa\xaa\xaa\xaa", b"\x55\x55\x55\x55"


def test_a_mask_is_told_in_the_next_plan_that_samples_for_its_row_and_once() -> None:
    scheduler = make_scheduler()
    a, b = add(scheduler, 3, 3)
    step(scheduler)
    scheduler.set_mask(a, ODD)
    assert step(scheduler).masks == [(a.row, ODD)]
    assert step(scheduler).masks == []
    scheduler.set_mask(a, EVEN)
    scheduler.set_mask(b, ODD)
    assert sorted(step(scheduler).masks) == sorted([(a.row, EVEN), (b.row, ODD)])


def test_a_mask_that_was_set_before_the_sequence_runs_comes_with_its_first_sample() -> None:
    scheduler = make_scheduler(budget=4)
    [seq] = add(scheduler, 9)
    scheduler.set_mask(seq, ODD)
    told = [step(scheduler).masks for _ in range(4)]
    assert told == [[], [], [(seq.row, ODD)], []], "chunks in the middle of a prompt sample nothing"


def test_of_two_masks_between_steps_the_last_counts() -> None:
    scheduler = make_scheduler()
    [seq] = add(scheduler, 3)
    step(scheduler)
    scheduler.set_mask(seq, ODD)
    scheduler.set_mask(seq, EVEN)
    assert step(scheduler).masks == [(seq.row, EVEN)]


def test_a_mask_is_lifted_once() -> None:
    scheduler = make_scheduler()
    [seq] = add(scheduler, 3)
    scheduler.set_mask(seq, ODD)
    step(scheduler)
    scheduler.set_mask(seq, None)
    assert step(scheduler).masks == [(seq.row, None)]
    assert step(scheduler).masks == []


def test_a_row_waits_for_its_mask_while_others_compute_their_prompts() -> None:
    scheduler = make_scheduler()
    [a] = add(scheduler, 3)
    step(scheduler)
    scheduler.set_mask(a, ODD)
    add(scheduler, 3)
    assert step(scheduler).masks == [], "a does not sample in this step"
    assert step(scheduler).masks == [(a.row, ODD)]


def test_a_fork_has_a_mask_of_its_own() -> None:
    scheduler = make_scheduler()
    family = add_family(scheduler, [1] * 6, 3, max_tokens=5)
    scheduler.set_mask(family[1], ODD)
    assert step(scheduler).masks == [(family[1].row, ODD)]


@pytest.mark.parametrize("policy", POLICIES)
def test_after_a_restart_the_mask_is_told_again(policy: str) -> None:
    """The row may have been another's in between."""
    scheduler, model = make_scheduler(num_blocks=4, max_model_len=16, policy=policy), ToyModel()
    a, b = make_sequence(0, [1] * 6, max_tokens=9), make_sequence(1, [2] * 6, max_tokens=9)
    for seq in (a, b):
        scheduler.add(seq)
    scheduler.set_mask(b, ODD)
    masked: dict[int, bytes | None] = {}  # what an executor knows that forgets the mask of a row that begins anew
    num_told = 0
    while scheduler.has_unfinished:
        plan = run_step(scheduler, model)
        for start in plan.started:
            masked.pop(start.row, None)
        masked.update(plan.masks)
        num_told += len(plan.masks)
        for _, row in samples_of(plan):
            mine = model.rows[row].token_ids[0] == 2
            assert masked.get(row) == (ODD if mine else None)
    assert b.num_preemptions > 0
    assert num_told == 1 + b.num_preemptions


def test_a_mask_lifted_while_its_sequence_waits_is_not_told_again() -> None:
    scheduler, model = make_scheduler(num_blocks=4, max_model_len=16), ToyModel()
    a, b = make_sequence(0, [1] * 6, max_tokens=9), make_sequence(1, [2] * 6, max_tokens=9)
    for seq in (a, b):
        scheduler.add(seq)
    scheduler.set_mask(b, ODD)
    while not b.num_preemptions:
        run_step(scheduler, model)
    scheduler.set_mask(b, None)
    masks = [mask for plan in drain(scheduler, model) for _, mask in plan.masks]
    assert set(masks) <= {None}


def test_with_a_step_in_flight_a_mask_counts_from_the_next_plan() -> None:
    scheduler = make_scheduler()
    [seq] = add(scheduler, 3)
    first = scheduler.schedule()
    scheduler.set_mask(seq, ODD)
    assert first.masks == []
    assert scheduler.schedule().masks == [(seq.row, ODD)]


def test_an_ended_sequence_leaves_no_mask_behind() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    a, b = add(scheduler, 3, 3)
    step(scheduler)
    scheduler.set_mask(a, ODD)
    scheduler.finish(a, "abort")
    assert [step(scheduler).masks for _ in range(3)] == [[], [], []]
    assert b.num_output_tokens == 3


def test_the_mask_of_an_ended_sequence_is_nobodys() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    a, b = add(scheduler, 3, 3, max_tokens=1)
    step(scheduler)
    assert a.finished
    scheduler.set_mask(a, ODD)
    assert step(scheduler).masks == []
    assert b.finished
    assert (scheduler.outbox.masks, scheduler.outbox.new_masks) == ({}, set()), "nobody would ever take it out again"
