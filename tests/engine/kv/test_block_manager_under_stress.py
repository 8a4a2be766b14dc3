"""Any run of calls keeps the block manager's books."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nanoengine.engine.kv.block_manager import BlockManager
from tests.engine.kv.test_block_manager import compute
from tests.engine.kv.toys import FAST, B, ToySequence, make_sequence, snapshot, tell


def check_tables(manager: BlockManager, seqs: list[ToySequence]) -> None:
    """Nothing leaks, and a block stands in two tables only if both sequences hold the tokens that it was published with."""
    manager.check()
    counts = [0] * (manager.pool.num_blocks + 1)
    owners: dict[int, tuple[ToySequence, int]] = {}
    for seq in seqs:
        assert len(seq.block_table) >= manager.blocks_for(seq.num_computed_tokens)
        for i, block in enumerate(seq.block_table):
            counts[block] += 1
            other, j = owners.setdefault(block, (seq, i))
            end = (i + 1) * B
            if other is not seq:
                assert i == j
                assert manager.pool.contents[block] is not None
                assert seq.token_ids[:end] == other.token_ids[:end]
                assert len(seq.token_ids) >= end
    assert counts == manager.pool.ref_counts


@FAST
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "compute", "append", "fail", "free", "preempt", "reset"]), st.integers(0, 999)
        ),
        max_size=80,
    ),
    st.booleans(),
)
def test_any_run_of_calls_keeps_the_books(calls: list[tuple[str, int]], caching: bool) -> None:
    manager = BlockManager(7, B, caching)
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
            compute(manager, seq, min(seq.num_uncomputed_tokens, 1 + number % 5))
        elif name == "append" and seq.num_uncomputed_tokens == 0:
            before = snapshot(manager.pool)
            tell(seq, number % 2)
            if manager.allocate_slots(seq) is None:
                assert snapshot(manager.pool) == before
                seq.token_ids.pop()
        elif name == "fail":
            manager.publish(seq, seq.num_computed_tokens + min(seq.num_uncomputed_tokens, 5), committed=False)
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
