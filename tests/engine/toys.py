"""Toys for the tests of this folder: short makers, a model of slots that notices every wrong block, a byte tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from hypothesis import HealthCheck, settings

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.block_pool import BlockPool
from nanoengine.engine.messages import UNKNOWN, Place, SampledBatch, ScheduledBatch, Tier
from nanoengine.engine.randomness import mix
from nanoengine.engine.scheduler import Scheduler
from nanoengine.engine.sequence import Sequence
from nanoengine.sampling_params import SamplingParams

FAST = settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
VOCAB_SIZE = 1000


def make_sequence(seq_id: int, prompt: Seq[int], *, eos: Seq[int] = (), **params: Any) -> Sequence:
    return Sequence(seq_id, list(prompt), SamplingParams(**params), eos_token_ids=eos)


def tell(seq: Sequence, *tokens: int) -> None:
    """Give a sequence new tokens, sampled and known."""
    seq.token_ids += tokens
    seq.num_known_tokens += len(tokens)


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 64,
    max_model_len: int = 64,
    caching: bool = True,
) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, block_size, caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
    )


def snapshot(pool: BlockPool) -> tuple[object, ...]:
    """Everything that a pool knows, as a value."""
    index = [(p.hash, id(p), p.blocks, p.host_slot) for p in pool.prefixes()]
    return tuple(pool.ref_counts), tuple(map(id, pool.contents)), tuple(pool.free_blocks), repr(index)


def free_order(pool: BlockPool) -> list[int]:
    return list(pool.free_blocks)


def answer(batch: ScheduledBatch, token: int = 7) -> SampledBatch:
    """The same token for every row that samples."""
    return SampledBatch([token] * len(batch.sampling))


class Done:
    """Results that are there."""

    def __init__(self, sampled: SampledBatch):
        self.sampled = sampled

    def result(self) -> SampledBatch:
        return self.sampled


class Eager:
    """An executor whose batches are over when they are launched."""

    execute: Callable[[ScheduledBatch], SampledBatch]

    def launch(self, batch: ScheduledBatch) -> Done:
        return Done(self.execute(batch))


class ToyModel(Eager):
    """An executor whose KV cache is a table of slots, and whose next token depends on every slot that attention reads.

    A slot holds a digest of all tokens up to its own, so a block that was never written, was overwritten, or belongs to
    another prefix changes the output. `fail_if` says which batches raise; those leave garbage behind, as a real one may.
    """

    def __init__(self, block_size: int = 4, fail_if: Callable[[ScheduledBatch], bool] = lambda _: False):
        self.block_size = block_size
        self.fail_if = fail_if
        self.slots: dict[tuple[int | str, int], int] = {}
        self.newest: dict[int, int] = {}  # row -> the token that was last sampled into it
        self.elsewhere: dict[Place, dict[int, int]] = {}  # what host memory and files hold: offset -> digest
        self.batches: list[ScheduledBatch] = []
        self.closed = 0

    def execute(self, batch: ScheduledBatch) -> SampledBatch:
        self.batches.append(batch)
        failing = self.fail_if(batch)
        if not failing:
            for transfer in batch.transfers:
                self._write(transfer.target, self._read(transfer.source))
        new_tokens = iter(batch.token_ids)
        for row, start, count, table in zip(
            batch.rows, batch.num_computed_tokens, batch.num_new_tokens, batch.block_tables, strict=True
        ):
            for position in range(start, start + count):
                token = next(new_tokens)
                token = self.newest.get(row, 0) if token == UNKNOWN else token
                history = self.slots[self._slot(table, position - 1)] if position else 0
                digest = -1 if failing else mix(3 * history + token + 1)
                self.slots[self._slot(table, position)] = digest
        if failing:
            raise RuntimeError("the step broke")
        sampled = [self._next_token(batch, row) for row in batch.sampled_rows]
        self.newest.update(zip(batch.sampled_into, sampled, strict=True))
        return SampledBatch(sampled)

    def close(self) -> None:
        self.closed += 1

    def _read(self, place: Place) -> dict[int, int]:
        if place.tier is not Tier.DEVICE:
            return dict(self.elsewhere[place])
        return {
            offset: self.slots[place.where, offset]
            for offset in range(self.block_size)
            if (place.where, offset) in self.slots
        }

    def _write(self, place: Place, content: dict[int, int]) -> None:
        if place.tier is not Tier.DEVICE:
            self.elsewhere[place] = content
            return
        for offset in range(self.block_size):
            self.slots.pop((place.where, offset), None)
        self.slots.update({(place.where, offset): digest for offset, digest in content.items()})

    @property
    def num_computed(self) -> int:
        return sum(sum(batch.num_new_tokens) for batch in self.batches)

    def _slot(self, table: list[int], position: int) -> tuple[int, int]:
        return table[position // self.block_size], position % self.block_size

    def _next_token(self, batch: ScheduledBatch, row: int) -> int:
        end = batch.num_computed_tokens[row] + batch.num_new_tokens[row]
        return _token_after([self.slots[self._slot(batch.block_tables[row], position)] for position in range(end)])


def _token_after(digests: list[int]) -> int:
    return mix(sum(digests)) % VOCAB_SIZE


def continuation(prompt: Seq[int], count: int) -> list[int]:
    """What ToyModel generates after a prompt if nothing goes wrong."""
    tokens = list(prompt)
    for _ in range(count):
        digests: list[int] = []
        for token in tokens:
            digests.append(mix(3 * (digests[-1] if digests else 0) + token + 1))
        tokens.append(_token_after(digests))
    return tokens[len(prompt) :]


def run_step(scheduler: Scheduler, model: ToyModel) -> ScheduledBatch:
    """One whole step, with the invariants checked at every stage."""
    batch = scheduler.schedule()
    scheduler.check()
    if batch:
        scheduler.update(batch, model.execute(batch))
        scheduler.check()
    return batch


def drain(scheduler: Scheduler, model: ToyModel, limit: int = 2000) -> list[ScheduledBatch]:
    """Run until nothing is left; more than `limit` steps count as never."""
    batches = []
    for _ in range(limit):
        if not scheduler.has_unfinished:
            return batches
        batches.append(run_step(scheduler, model))
    raise AssertionError("the scheduler does not come to an end")


class ByteTokenizer:
    """One token per byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Seq[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


seq_ids = itertools.count()


def add(scheduler: Scheduler, *lengths: int, **params: object) -> list[Sequence]:
    """Queue sequences with these prompt lengths; their prompts share nothing."""
    seqs = []
    for length, seq_id in zip(lengths, seq_ids, strict=False):
        seqs.append(make_sequence(seq_id, [10 * seq_id + 1] * length, **params))
        scheduler.add(seqs[-1])
    return seqs


def ids(*seqs: Sequence) -> list[int]:
    return [seq.seq_id for seq in seqs]


def step(scheduler: Scheduler, token: int = 7) -> ScheduledBatch:
    """One step that samples the same token everywhere."""
    batch = scheduler.schedule()
    scheduler.check()
    scheduler.update(batch, answer(batch, token))
    scheduler.check()
    return batch


def assert_idle(scheduler: Scheduler) -> None:
    """Nothing is left: no sequence, no block in use."""
    scheduler.check()
    assert not scheduler.has_unfinished
    assert scheduler.block_manager.pool.num_free == scheduler.block_manager.pool.num_blocks
    assert not scheduler.schedule()
