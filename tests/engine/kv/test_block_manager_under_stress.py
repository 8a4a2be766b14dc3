"""Any run of calls keeps the block manager's books."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.block_pool import NULL_BLOCK
from nanoengine.engine.kv.groups import KVSpec
from tests.engine.kv.test_block_manager import compute
from tests.engine.kv.toys import FAST, B, ToySequence, make_sequence, snapshot, tell

FULL, WINDOW, CHUNKED = KVSpec(), KVSpec("window", 3), KVSpec("chunked", 6)
MOST_NEW = 5


def check_tables(manager: BlockManager, seqs: list[ToySequence]) -> None:
    """Nothing leaks, and a block stands in two tables only if both are of one group, and both sequences hold the tokens that it
    was published with.
    """
    manager.check()
    counts = [0] * (manager.pool.num_blocks + 1)
    owners: dict[int, tuple[ToySequence, int, int]] = {}
    for seq in seqs:
        manager.check_tables(seq)  # type: ignore[arg-type]
        for group, table in enumerate(seq.block_tables):
            for i, block in enumerate(table):
                if block == NULL_BLOCK:
                    continue
                counts[block] += 1
                other, *place = owners.setdefault(block, (seq, group, i))
                end = (i + 1) * B
                assert place == [group, i]
                if other is not seq:
                    assert manager.pool.contents[block] is not None
                    assert seq.token_ids[:end] == other.token_ids[:end]
                    assert len(seq.token_ids) >= end
    assert counts == manager.pool.ref_counts


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW), (CHUNKED, FULL, WINDOW)], ids=len)
@FAST
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["admit", "compute", "append", "fail", "free", "preempt", "reset"]), st.integers(0, 999)
        ),
        max_size=80,
    ),
    caching=st.booleans(),
)
def test_any_run_of_calls_keeps_the_books(
    specs: tuple[KVSpec, ...], calls: list[tuple[str, int]], caching: bool
) -> None:
    manager = BlockManager(2 + 5 * len(specs), B, caching, specs=specs, most_new_tokens=MOST_NEW)
    running: list[ToySequence] = []
    for name, number in calls:
        seq = running[number % len(running)] if running else None
        if name == "admit":
            # Few different tokens, so that prefixes meet.
            new = make_sequence(number, [number % 2] * (1 + number % 6) + [number % 3] * (number % 7))
            before = snapshot(manager.pool)
            cached = manager.admit(new)
            if cached is None:
                assert snapshot(manager.pool) == before
            else:
                assert cached % B == 0
                assert cached < new.num_tokens
                new.num_computed_tokens = cached
                running.append(new)
        elif name == "reset":
            assert manager.reset_prefix_cache() == (not running)
        elif seq is None:
            continue
        elif name == "compute":
            before = snapshot(manager.pool)
            if manager.allocate_slots(seq, num_lookahead=1) is None:
                assert snapshot(manager.pool) == before
            else:
                compute(manager, seq, min(seq.num_uncomputed_tokens, 1 + number % MOST_NEW))
        elif name == "append" and seq.num_uncomputed_tokens == 0:
            before = snapshot(manager.pool)
            tell(seq, number % 2)
            if manager.allocate_slots(seq) is None:
                assert snapshot(manager.pool) == before
                seq.token_ids.pop()
        elif name == "fail":
            end = seq.num_computed_tokens + min(seq.num_uncomputed_tokens, MOST_NEW)
            if end <= seq.num_slots:
                manager.publish(seq, end, committed=False)
            manager.take_orders()
            for fallen in manager.rollback([seq], running):
                manager.discard(fallen)
                running.remove(fallen)
        elif name in ("free", "preempt"):
            manager.free(seq)
            running.remove(seq)
            if name == "preempt":
                seq.num_computed_tokens = 0
                cached = manager.admit(seq)
                if cached is not None:
                    seq.num_computed_tokens = cached
                    running.append(seq)
        check_tables(manager, running)
    for seq in running:
        manager.free(seq)
    assert manager.pool.num_free == manager.pool.num_blocks
