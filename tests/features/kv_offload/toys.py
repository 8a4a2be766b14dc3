"""A toy model whose blocks go to a toy's host memory and files, and engines around it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.messages import StepPlan, StepResult
from nanoengine.core.seams import KVLayout, KVStore
from nanoengine.features.kv_groups.snapshots import Snapshots
from nanoengine.features.kv_offload.disk_index import DiskIndex
from nanoengine.features.kv_offload.file_gate import FileGate
from nanoengine.features.kv_offload.host_tier import HostTier
from nanoengine.features.kv_offload.messages import KV_OFFLOAD, FileOutcome, FileRead, Location, OffloadOrders, Tier
from nanoengine.features.kv_offload.offload import Offload
from tests.core.toys import Done, ToyModel, check, make_engine
from tests.features.kv_groups.remembering import FIRST_SLOT, RememberingModel, State

SIZE = 4
SEED = 5

Content = dict[int, tuple[int, int, int]]
Files = dict[str, tuple[bytes, Content]]


class OffloadToy(ToyModel):
    """Copies are made one by one. Files are done some steps later, as the dice say, and some cannot be read or written.

    Args:
        files: what is on disk: (header, content) by name.
        most_files: deleted in the order in which they were written, when there are more.
        bad: how likely a read or a write fails.
    """

    def __init__(self, files: Files, rng: random.Random, *, bad: float = 0.0, most_files: int = 9999, **model: Any):
        super().__init__(SIZE, **model)
        self.files, self.rng, self.bad, self.most_files = files, rng, bad, most_files
        self.host: dict[int, Content] = {}
        self.staged: dict[str, Content] = {}
        self.kept: set[str] = set()
        self.jobs: deque[Any] = deque()
        self.answers: list[FileOutcome] = []
        self.is_quick = False
        self.loading: dict[int, dict[int, Any]] = {}  # pieces of states in rows

    def launch(self, plan: StepPlan) -> Done:
        is_failing = self.num_launched + 1 in self.failing
        if plan.epoch > self.failed_epoch and not (
            is_failing and self.rng.random() < 0.5
        ):  # it may fail behind its copies
            self._zero(plan)
            self._carry_out(plan.extras[KV_OFFLOAD])
        done = super().launch(plan)
        if isinstance(done._result, StepResult):
            while self.jobs and (self.is_quick or self.rng.random() < 0.4):
                self._do(self.jobs.popleft())
            done._result.extras[KV_OFFLOAD], self.answers = self.answers, []
        return done

    def _zero(self, plan: StepPlan) -> None:
        """Before anything is copied."""
        for block in plan.zeroed:
            for offset in range(SIZE):
                self.slots.pop((block, offset), None)
        plan.zeroed = []

    def _carry_out(self, orders: OffloadOrders) -> None:
        if orders.clears:
            while self.jobs:
                self._do(self.jobs.popleft())
            self.files.clear()
        self.jobs += orders.deletes
        for read in orders.reads:
            self.kept.add(read.name)
            if read.name in self.staged:
                self.answers.append(FileOutcome("read", read.name))
            elif read not in self.jobs:
                self.jobs.append(read)
        for source, target, header in orders.copies:
            content = self._content(source)
            if target.tier is Tier.POOL:
                for offset, slot in content.items():
                    self.slots[int(target.key), offset] = slot
            elif target.tier is Tier.STATES:
                slot, number = divmod(int(target.key), self.num_pieces)
                self.loading.setdefault(slot, {})[number] = content[number]
            elif target.tier is Tier.HOST:
                self.host[int(target.key)] = content
            else:
                self.jobs.append((target.key, header, content))
        if orders.wanted is not None:
            self.kept = set(orders.wanted)
            self.staged = {name: content for name, content in self.staged.items() if name in self.kept}

    def _content(self, place: Location) -> Content:
        if place.tier is Tier.POOL:
            assert place.key, "the null block is not copied"
            return {offset: self.slots[int(place.key), offset] for offset in range(SIZE)}
        if place.tier is Tier.STATES:
            slot, number = divmod(int(place.key), self.num_pieces)
            return {number: self.states[slot]}  # type: ignore[dict-item]
        return dict(self.host[int(place.key)] if place.tier is Tier.HOST else self.staged[str(place.key)])

    def _do(self, job: Any) -> None:
        """One piece of work of the thread of files."""
        if isinstance(job, str):
            self.files.pop(job, None)
            return
        problem = "drawn" if self.rng.random() < self.bad else None
        if isinstance(job, FileRead):
            header, content = self.files.get(job.name, (b"", {}))
            problem = problem or (None if header == job.header else "missing or another")
            if problem:
                self.files.pop(job.name, None)
            elif job.name in self.kept:
                self.staged[job.name] = dict(content)
            self.answers.append(FileOutcome("read", job.name, problem))
            return
        name, header, content = job
        if not problem:
            self.files[name] = header, content
            while len(self.files) > self.most_files:
                gone = next(iter(self.files))
                del self.files[gone]
                self.answers.append(FileOutcome("gone", gone))
        self.answers.append(FileOutcome("written", name, problem))

    num_pieces = 0
    states: dict[int, State]

    def restored(self, row: int, slot: int) -> State:
        """A state that was loaded is there when all its pieces are."""
        if row != slot:
            return self.states[slot]
        pieces = self.loading.pop(row)
        assert sorted(pieces) == list(range(self.num_pieces))
        assert len(set(pieces.values())) == 1
        return pieces[0]

    def close(self) -> None:
        while self.jobs:
            self._do(self.jobs.popleft())
        super().close()


class HybridToy(OffloadToy, RememberingModel):
    """It has states, too, which lie in pieces where blocks lie."""

    num_pieces = 3


def offload_engine(
    model: OffloadToy,
    *,
    num_blocks: int,
    num_slots: int = 0,
    max_staged: int | None = None,
    layouts: Seq[KVLayout] = (KVLayout(),),
    parts: Iterable[Any] = (),
    stores: Iterable[Any] = (),
    num_snapshots: int = 20,
    **options: Any,
) -> tuple[LLMEngine, Offload]:
    """An engine with a host tier of `num_slots`, and with files if `max_staged` is given."""
    disk = None if max_staged is None else DiskIndex(model.files, "model", max_staged)
    offload = Offload(HostTier(num_slots), disk, len(layouts), model.num_pieces)
    kept: list[KVStore] = [offload, *stores]
    blocks = BlockManager(num_blocks, SIZE, layouts, kept)
    blocks.seed = SEED
    gates = [] if disk is None else [FileGate(offload, disk, blocks)]
    states = []
    if model.num_pieces:
        states.append(Snapshots(blocks, num_snapshots, FIRST_SLOT))
        states[0].keep_in(offload, model.num_pieces)
        kept.insert(0, states[0])
    engine = make_engine(blocks=blocks, model=model, parts=[*parts, *states, offload, *gates], **options)
    return engine, offload


def snapshots_of(engine: LLMEngine) -> Snapshots | None:
    return next((part for part in engine.scheduler.parts if isinstance(part, Snapshots)), None)


def check_offload(engine: LLMEngine, offload: Offload) -> None:
    """Raise AssertionError if an invariant of the engine or of the tiers is broken."""
    check(engine.scheduler)
    blocks, host, disk = engine.scheduler.blocks, offload.host, offload.disk
    found = {(group, hash): block for group, index in enumerate(blocks.index) for hash, block in index.items()}
    in_pool = {key: own.block for key, own in offload.in_pool.items()}
    assert {key: block for key, block in in_pool.items() if key[0] in offload.groups} == found
    if (snapshots := snapshots_of(engine)) is not None:
        n = len(offload.state_groups)
        states = {
            (group, hash): kept.slot * n + number
            for hash, kept in snapshots.index.items()
            for number, group in enumerate(offload.state_groups)
        }
        assert {key: states[key] for key in in_pool if key[0] in offload.state_groups} == {
            key: block for key, block in in_pool.items() if key[0] in offload.state_groups
        }
    slots = [entry.slot for entry in host.entries.values()]
    assert sorted([*host.free_slots, *slots]) == list(range(host.num_slots))
    assert not host.held
    if disk is not None:
        assert len(disk.wanted) <= disk.max_staged
        assert set(disk.reading) | set(disk.staged) <= set(disk.wanted)
        assert not disk.files & disk.writing
        [gate] = (part for part in engine.scheduler.parts if isinstance(part, FileGate))
        fetches = gate.fetches
        assert sum(disk.wanted.values()) == sum(map(len, fetches.values()))
        assert set(fetches) <= set(engine.scheduler.waiting)
    if not engine.scheduler.in_flight:
        assert not offload._in_flight
