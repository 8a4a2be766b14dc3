"""Toys for tests of KV groups: two groups, if nothing else is said, and prompts that are computed chunk by chunk."""

from __future__ import annotations

from pathlib import Path

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.block_pool import NULL_BLOCK
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.groups import WINDOW, KVSpec
from nanoengine.engine.kv.host_tier import HostTier
from tests.engine.kv.toys import B, ToySequence, make_sequence, settle

FULL, SIX = KVSpec(), KVSpec(WINDOW, 6)
PROMPT = list(range(17))
"""Four blocks and a token. Behind them a window of 6 sees the last two."""


def make(
    *specs: KVSpec, num_blocks: int = 40, most_new: int = B, host: int = 0, disk: Path | None = None
) -> BlockManager:
    manager = BlockManager(
        num_blocks,
        B,
        specs=specs or (FULL, SIX),
        most_new_tokens=most_new,
        host=HostTier(host) if host else None,
        disk=None if disk is None else DiskTier(disk, "model", 8, 1 << 20),
        hash_seed=3,
    )
    manager.collect_events = True
    return manager


def begin(manager: BlockManager, seq_id: int, prompt: list[int]) -> ToySequence:
    seq = make_sequence(seq_id, prompt)
    cached = manager.admit(seq)
    assert cached is not None
    seq.num_computed_tokens = seq.num_cached_tokens = cached
    return seq


def prefill(manager: BlockManager, seq: ToySequence) -> None:
    """Compute all tokens of an admitted sequence, chunk by chunk, as the scheduler does."""
    while seq.num_uncomputed_tokens:
        assert manager.allocate_slots(seq, num_lookahead=1) is not None
        count = min(seq.num_uncomputed_tokens, manager.groups.most_new)
        assert seq.num_computed_tokens + count <= seq.num_slots
        manager.publish(seq, seq.num_computed_tokens + count, committed=False)
        seq.num_computed_tokens += count
        manager.check_tables(seq)  # type: ignore[arg-type]
    settle(manager)


def serve(manager: BlockManager, seq_id: int, prompt: list[int]) -> ToySequence:
    """The whole life of a sequence that generates nothing."""
    seq = begin(manager, seq_id, prompt)
    prefill(manager, seq)
    manager.free(seq)
    return seq


def num_held(seq: ToySequence) -> list[int]:
    """Blocks in each table."""
    return [sum(block != NULL_BLOCK for block in table) for table in seq.block_tables]


def copies(manager: BlockManager, seq: ToySequence, group: int) -> list[tuple[int, ...]]:
    """The blocks that hold a group's K/V of each full block of a sequence."""
    found = []
    for hash in seq.block_hashes:
        [prefix] = manager.pool.of_hash(hash)
        kv = prefix.kv[group]
        found.append(() if kv is None else kv.blocks)
    return found


def lose(manager: BlockManager, seq: ToySequence, group: int, *indices: int) -> None:
    """The pool loses some blocks of a group."""
    found = copies(manager, seq, group)
    for i in indices:
        for block in found[i]:
            manager.pool.withdraw(block)
    manager.check()
