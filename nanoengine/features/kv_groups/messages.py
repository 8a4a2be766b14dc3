"""Messages of recurrent states: the orders of a plan for the states of rows and for snapshots. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

STATE_ORDERS = "states"
"""The key in `StepPlan.extras` (a StateOrders)."""


class TakeSnapshot(NamedTuple):
    """Copy the states of a row behind its first `position` tokens to a slot."""

    row: int
    position: int
    slot: int


class RestoreSnapshot(NamedTuple):
    """Copy the states of a slot to a row that starts: the slot of a snapshot, or that of the row, if they were loaded there. A
    row without such an order starts from zeros.
    """

    row: int
    slot: int


@dataclass(slots=True)
class StateOrders:
    """The orders of one plan, in the order in which they are carried out."""

    restores: list[RestoreSnapshot] = field(default_factory=list)
    snapshots: list[TakeSnapshot] = field(default_factory=list)
