"""Outbox: what is told of a row, and when."""

from __future__ import annotations

from nanoengine.engine.messages import StepPlan
from nanoengine.engine.outbox import Outbox
from nanoengine.engine.sequence import Sequence
from tests.engine.toys import make_sequence


def running(row: int, *tokens: int) -> Sequence:
    seq = make_sequence(row, tokens)
    seq.row, seq.block_tables = row, [[row + 10]]
    return seq


def test_a_row_begins_with_copies_of_all_that_the_sequence_has() -> None:
    outbox, plan, seq = Outbox(), StepPlan(), running(2, 5, 6)
    outbox.tell_start(plan, seq)
    seq.token_ids.append(7)
    seq.block_tables[0].append(99)
    [start] = plan.started
    assert (start.row, start.token_ids, start.tables) == (2, [5, 6], ([12],))
    assert start.sampling is seq.sampling


def test_a_restart_waits_for_a_plan_in_which_sequences_decode_and_is_told_once() -> None:
    outbox, seq = Outbox(), running(1, 4)
    outbox.restart(seq)
    chunks_only, decodes, next_decodes = StepPlan(), StepPlan(), StepPlan()
    outbox.send(chunks_only, [])
    assert outbox.restarts(seq)
    outbox.tell_restarts(decodes)
    outbox.tell_restarts(next_decodes)
    assert [len(plan.started) for plan in (chunks_only, decodes, next_decodes)] == [0, 1, 0]
    assert not outbox.restarts(seq)


def test_a_row_that_is_given_back_is_told_once_and_begins_no_more() -> None:
    outbox, seq = Outbox(), running(3, 4)
    outbox.restart(seq)
    outbox.stop(seq)
    first, second = StepPlan(), StepPlan()
    outbox.tell_restarts(first)
    outbox.send(first, [])
    outbox.send(second, [])
    assert (first.started, first.ended, second.ended) == ([], [3], [])


def test_a_mask_is_told_when_its_row_samples_and_again_when_it_begins_anew() -> None:
    outbox, seq, other = Outbox(), running(0, 4), running(1, 5)
    outbox.set_mask(seq, b"\x0f\0\0\0")
    plans = [StepPlan() for _ in range(5)]
    outbox.send(plans[0], [other])
    outbox.send(plans[1], [other, seq])
    outbox.send(plans[2], [seq])
    outbox.tell_start(plans[3], seq)
    outbox.send(plans[3], [seq])
    outbox.set_mask(seq, None)
    outbox.send(plans[4], [seq])
    assert [plan.masks for plan in plans] == [[], [(0, b"\x0f\0\0\0")], [], [(0, b"\x0f\0\0\0")], [(0, None)]]


def test_the_masks_of_ended_sequences_are_forgotten() -> None:
    outbox, seq = Outbox(), running(0, 4)
    outbox.set_mask(seq, b"\0\0\0\0")
    outbox.forget(seq)
    plan = StepPlan()
    outbox.send(plan, [seq])
    assert plan.masks == []
    assert not outbox.masks
