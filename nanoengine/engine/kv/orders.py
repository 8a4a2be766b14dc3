"""What the executor is to do for the cache, plan by plan; and what of it counts only when that plan is committed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from nanoengine.engine.kv.block_pool import BlockPool, Prefix, PrefixKV
from nanoengine.engine.messages import FileRead, FileWrite, Transfer
from nanoengine.engine.sequence import Sequence


class Orders(NamedTuple):
    """What a StepPlan must carry."""

    transfers: list[Transfer]  # in this order
    reads: list[FileRead]
    writes: list[FileWrite]
    deletes: list[str]


Published = tuple[Sequence, list[list[int]], int, Prefix]
"""A sequence's promise that a block will hold a prefix. The list of its tables tells one life of it from the next: it lasts from
admission to the end or to preemption.
"""

Forgotten = tuple[Sequence, list[list[int]], int, Prefix | None]
"""A block that a life of a sequence has given back, since it sees it no longer or has ended, and what of the cache it held, if
anything.
"""


@dataclass(slots=True, eq=False)
class PlanRecord:
    """A plan that is being made or in flight."""

    transfers: list[Transfer] = field(default_factory=list)
    reads: list[FileRead] = field(default_factory=list)
    writes: list[FileWrite] = field(default_factory=list)
    deletes: list[str] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)  # (parent, child)
    forgotten: list[Forgotten] = field(default_factory=list)
    saved: list[tuple[PrefixKV, int]] = field(default_factory=list)  # to a slot of host memory
    pinned: list[int] = field(default_factory=list)  # host slots that its transfers touch

    def orders(self) -> Orders:
        return Orders(self.transfers, self.reads, self.writes, self.deletes)

    def commit(self, pool: BlockPool) -> None:
        """It was executed: its blocks hold what was promised."""
        uncommitted = pool.uncommitted
        for _, _, block, _ in self.published:
            if uncommitted.get(block) is self:
                del uncommitted[block]


def find_fallout(
    spoilt: PlanRecord,
    later: Collection[PlanRecord],
    pool: BlockPool,
    failed: Iterable[Sequence],
    running: Iterable[Sequence],
) -> tuple[list[Sequence], list[int]]:
    """What falls with a plan that failed.

    Nothing that it promised was written. Who shares such a block fails too, and so does what those have promised in later plans,
    and who shares that. A block that was given on in the meantime holds something else now, and harms nobody.

    Args:
        failed: the sequences of the plan, also those that have ended since.
        running: all that have blocks.

    Returns:
        the sequences that fail, the given ones first; and the blocks whose content goes, parents first.
    """
    running = list(running)
    given, are_running = list(failed), set(running)
    fallen = dict.fromkeys(given)
    blocks: dict[int, None] = {}
    prefixes: set[Prefix] = set()
    copies: set[tuple[int, Prefix]] = set()
    ruined: set[int] = set()  # lives that had a copy that goes: ids of their tables

    def withdraw(plan: PlanRecord, block: int, prefix: Prefix) -> None:
        prefixes.add(prefix)
        copies.add((block, prefix))
        if pool.uncommitted.get(block) is plan:
            blocks[block] = None

    for _, _, block, prefix in spoilt.published:
        withdraw(spoilt, block, prefix)
    had = {seq: {block for table in seq.block_tables for block in table} for seq in running}
    size = -1
    while size < len(fallen) + len(copies) + len(ruined):
        size = len(fallen) + len(copies) + len(ruined)
        for plan in (spoilt, *later):
            fallen |= {child: None for parent, child in plan.forks if parent in fallen}
            for seq, tables, block, held in plan.forgotten:
                if (block, held) in copies:
                    ruined.add(id(tables))
                    if tables is seq.block_tables:
                        fallen[seq] = None
            for seq, tables, block, prefix in plan.published:
                # Somebody who has held the block since, and has had nothing that goes, has computed it from sound copies.
                is_held = seq in are_running and tables is seq.block_tables and block in had[seq]
                is_sound = prefix.parent not in prefixes or is_held
                if seq in fallen or id(tables) in ruined or not is_sound:
                    withdraw(plan, block, prefix)
        fallen |= {seq: None for seq in running if not blocks.keys().isdisjoint(had[seq])}
    return [seq for seq in fallen if seq in are_running or seq in given], list(blocks)
