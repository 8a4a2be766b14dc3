"""A toy model with states: the state of a row is the list of tokens that it has gone through."""

from __future__ import annotations

from typing import Any

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.messages import Run, StepPlan, StepResult
from nanoengine.core.seams import KVStore, PolicyPart
from nanoengine.features.kv_groups.messages import STATE_ORDERS, StateOrders
from nanoengine.features.kv_groups.snapshots import Snapshots
from tests.core.toys import Done, ToyModel, make_engine

State = tuple[int, ...]

FIRST_SLOT = 1000
"""Of snapshots, behind those of rows."""


class RememberingModel(ToyModel):
    """Carries out the orders for states, and sees that a run begins with the state of the tokens whose K/V it reads."""

    def __init__(self, block_size: int, **more: Any):
        super().__init__(block_size, **more)
        self.states: dict[int, State] = {}  # of rows, and snapshots, by slot
        self.drafted: dict[int, tuple[int, State]] = {}
        self.orders: dict[int, list[tuple[int, int]]] = {}

    def launch(self, plan: StepPlan) -> Done:
        if plan.epoch <= self.failed_epoch or self.num_launched + 1 in self.failing:
            return super().launch(plan)
        orders: StateOrders = plan.extras.get(STATE_ORDERS) or StateOrders()
        restored = dict(orders.restores)
        for start in plan.started:
            self.drafted.pop(start.row, None)
            self.states[start.row] = self.restored(start.row, restored[start.row]) if start.row in restored else ()
        self.orders = {}
        for row, position, slot in orders.snapshots:
            self.orders.setdefault(row, []).append((position, slot))
        done = super().launch(plan)
        assert not self.orders, "a snapshot was ordered of a row that is not in the step"
        return done

    def restored(self, row: int, slot: int) -> State:
        assert row != slot, "nothing is loaded here"
        return self.states[slot]

    def _compute(self, run: Run, is_decode: bool, result: StepResult) -> None:
        known, (table, *_), _ = self.rows[run.row]
        tokens = (self.last[run.row], *run.drafts) if is_decode else known[run.start : run.start + run.num_new]
        state, base = self.states[run.row], len(self.states[run.row])
        if run.row in self.drafted:
            start, guessed = self.drafted.pop(run.row)
            state += guessed[: run.start - start]
        assert len(state) == run.start, "a run begins with the state of the tokens before it"
        for position, token in enumerate(state):
            assert self.slots[table[position // self.block_size], position % self.block_size][0] == token
        after = state + tuple(tokens)
        for position, slot in self.orders.pop(run.row, []):
            assert base <= position <= (run.start if run.drafts else len(after))
            self.states[slot] = after[:position]
        self.states[run.row] = state if run.drafts else after
        if run.drafts:
            self.drafted[run.row] = run.start, tuple(tokens)
        super()._compute(run, is_decode, result)


def make_hybrid(
    *,
    num_blocks: int = 400,
    block_size: int = 4,
    num_snapshots: int = 50,
    model: Any = None,
    **more: Any,
) -> tuple[LLMEngine, Snapshots]:
    stores: list[KVStore] = []
    caching = more.pop("enable_prefix_caching", True)
    blocks = BlockManager(num_blocks, block_size, stores=stores, enable_prefix_caching=caching)
    snapshots = Snapshots(blocks, num_snapshots, FIRST_SLOT)
    stores.append(snapshots)
    parts: list[PolicyPart] = [*more.pop("parts", []), snapshots]
    model = model or RememberingModel(block_size)
    return make_engine(blocks=blocks, block_size=block_size, model=model, parts=parts, **more), snapshots


def check_slots(snapshots: Snapshots) -> None:
    """Of an idle engine: every slot is free or has one snapshot."""
    slots = [*snapshots.free, *(kept.slot for kept in snapshots.index.values())]
    assert sorted(slots) == list(range(FIRST_SLOT, FIRST_SLOT + snapshots.num_slots))
