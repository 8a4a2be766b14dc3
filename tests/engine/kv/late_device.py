"""An executor for random lives: plans are executed some time after they were launched, and files are done when they like."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from nanoengine.engine.kv.block_pool import BlockPool
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.groups import KVSpec
from nanoengine.engine.kv.orders import Orders
from nanoengine.engine.messages import FileDone, FileRead, FileWrite, Place, Tier
from tests.engine.kv.slot_memory import GARBAGE, NAN, Content, Slot, SlotMemory
from tests.engine.kv.toys import ToySequence


@dataclass
class Row:
    """What a plan computes of one sequence."""

    seq: ToySequence
    life: int  # how often the sequence has been admitted
    tables: list[list[int]]
    tokens: list[int]
    start: int
    encodes: bool  # its encoder's tokens come first
    poisoned: bool = False
    fault: Slot | None = None  # what it wrote instead of what it should have, after it was executed


@dataclass(eq=False)
class ToyPlan:
    """A plan on its way."""

    orders: Orders
    rows: list[Row]
    others: list[ToySequence]  # that have been given blocks for it too
    sampled: list[ToySequence] = field(default_factory=list)
    forks: list[tuple[ToySequence, ToySequence]] = field(default_factory=list)  # they sample from one row
    fate: str = "good"  # or "never begun", or "broken"
    num_done: int = 99  # transfers that are made if it breaks
    is_executed: bool = False


class LateDevice:
    """A memory, and a thread of files that knows no steps: it may be early, late, or meet files that somebody has damaged."""

    def __init__(self, block_size: int, specs: tuple[KVSpec, ...]):
        self.memory = SlotMemory(block_size, specs)
        self.plans: deque[ToyPlan] = deque()
        self.files: dict[str, tuple[bytes, Content]] = {}
        self.jobs: deque[FileRead | str | tuple[FileWrite, Content]] = deque()
        self.answers: list[FileDone] = []
        self._reading: set[str] = set()

    def launch(self, plan: ToyPlan) -> None:
        """Host memory is touched at once, the pool when the device gets there."""
        self.plans.append(plan)
        if plan.fate == "never begun":
            return
        if any(order.source.tier is Tier.DEVICE for order in plan.orders.writes):
            for earlier in list(self.plans)[:-1]:
                self.execute(earlier)
        writes = [(order, dict(self.memory.blocks[order.source])) for order in plan.orders.writes]
        for read in plan.orders.reads:
            if read.path not in self._reading:
                self._reading.add(read.path)
                self.jobs.append(read)
                self.memory.spoil([Place(Tier.HOST, read.slot)])
        self.jobs += plan.orders.deletes
        self.jobs += writes

    def execute(self, plan: ToyPlan) -> None:
        """Do the copies and compute; a broken plan leaves garbage."""
        if plan.is_executed:
            return
        plan.is_executed = True
        if plan.fate == "never begun":
            return
        transfers = plan.orders.transfers
        if plan.fate == "broken":
            self.memory.move(transfers[: plan.num_done])
            self.memory.spoil(transfer.target for transfer in transfers[plan.num_done :])
        else:
            self.memory.move(transfers)
        for row in plan.rows:
            fault = GARBAGE if plan.fate == "broken" else NAN if row.poisoned else None
            salt, num_encoder_tokens = row.seq.cache_salt, row.seq.num_encoder_tokens
            row.fault = self.memory.compute(
                salt, row.tables, row.tokens, row.start, num_encoder_tokens, encodes=row.encodes, fault=fault
            )

    def land(self) -> ToyPlan:
        """The oldest plan is over."""
        plan = self.plans.popleft()
        self.execute(plan)
        return plan

    def take_answers(self) -> list[FileDone]:
        answers, self.answers = self.answers, []
        self._reading -= {done.path for done in answers}
        return answers

    def do_files(self, count: int, *, broken: bool = False) -> None:
        """The thread gets on by some files; if `broken`, none of them can be read or written."""
        for _ in range(min(count, len(self.jobs))):
            job = self.jobs.popleft()
            if isinstance(job, str):
                self.files.pop(job, None)
            elif isinstance(job, FileRead):
                header, content = self.files.get(job.path, (b"", {}))
                is_good = header == job.header and not broken
                if is_good:
                    self.memory.blocks[Place(Tier.HOST, job.slot)] = dict(content)
                self.answers.append(FileDone(job.path, None if is_good else "damaged"))
            else:
                order, content = job
                if not broken:
                    self.files[order.path] = (order.header, content)
                self.answers.append(FileDone(order.path, "no space left" if broken else None))

    def after(self, orders: Orders) -> SlotMemory:
        """What the memory will hold when all plans on their way, and the one that is being made, have made their copies."""
        later = LateDevice(self.memory.block_size, self.memory.specs)
        later.memory = self.memory.copy()
        for plan in self.plans:
            if not plan.is_executed:
                rows = [replace(row, poisoned=False) for row in plan.rows]
                later.execute(ToyPlan(plan.orders, rows, []))
        later.memory.move(orders.transfers)
        return later.memory

    def check_files(self, disk: DiskTier, pool: BlockPool) -> None:
        """Every file that may be read and is undamaged holds the tokens that its name stands for."""
        for path, (header, content) in self.files.items():
            name = disk.name_at(path)
            if name not in disk.files or name in disk.writing or not header:
                continue
            size = 4 * self.memory.block_size
            group, whole = content[self.memory.block_size - 1]
            first = len(whole) % 4 + size  # the salt has one byte or none
            hash, parent_hash = pool.hash_block(b"", whole[:first]), b""
            for start in range(first, len(whole), size):
                hash, parent_hash = pool.hash_block(hash, whole[start : start + size]), hash
            assert name == disk.name(hash, parent_hash, group), "a file holds other tokens"
            assert content == self.memory.full_block(group, whole)
