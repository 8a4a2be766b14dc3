"""The invariants notice what is broken on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nanoengine.engine.scheduler import Scheduler
from tests.engine.toys import ToyModel, add, make_scheduler, run_step


def give_a_row_twice(scheduler: Scheduler) -> None:
    scheduler.free_rows.append(0)


def share_a_row(scheduler: Scheduler) -> None:
    scheduler.running[0].row = scheduler.running[1].row


def forget_a_reference(scheduler: Scheduler) -> None:
    scheduler.running[0].block_tables[0].pop()


def swap_ages(scheduler: Scheduler) -> None:
    scheduler.running.reverse()


def hold_a_stranger(scheduler: Scheduler) -> None:
    scheduler.held.add(scheduler.waiting[0])


def compute_while_waiting(scheduler: Scheduler) -> None:
    scheduler.waiting[0].num_computed_tokens = 1


def expect_a_token_of_nobody(scheduler: Scheduler) -> None:
    scheduler.waiting[0].num_tokens += 1


def forget_a_client(scheduler: Scheduler) -> None:
    scheduler.shares.remove("")


@pytest.mark.parametrize(
    "damage",
    [
        give_a_row_twice,
        share_a_row,
        forget_a_reference,
        swap_ages,
        hold_a_stranger,
        compute_while_waiting,
        expect_a_token_of_nobody,
        forget_a_client,
    ],
)
def test_damage_is_found(damage: Callable[[Scheduler], None]) -> None:
    scheduler, model = make_scheduler(max_num_seqs=2), ToyModel()
    add(scheduler, 5, 6, 7, max_tokens=9)
    for _ in range(3):
        run_step(scheduler, model)
    damage(scheduler)
    with pytest.raises(AssertionError):
        scheduler.check()
