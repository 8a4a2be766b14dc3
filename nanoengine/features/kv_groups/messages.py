"""What the policy orders of the states of rows, and of their snapshots, plan by plan. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

ORDERS = "states"
"""The key in `StepPlan.extras` (a StateOrders)."""


class Snapshot(NamedTuple):
    """Copy the states of a row, as they are behind its first `position` tokens."""

    row: int
    position: int
    slot: int


class Restore(NamedTuple):
    """A row that starts takes its states from a slot: that of a snapshot, or its own, if they were loaded there. One without such
    an order starts from zeros.
    """

    row: int
    slot: int


@dataclass(slots=True)
class StateOrders:
    """What one plan orders, in this order."""

    restores: list[Restore] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
