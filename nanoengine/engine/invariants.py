"""What always holds between two steps of a scheduler, as code. Tests call it after every step."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from nanoengine.engine.sequence import NO_ROW, Status

if TYPE_CHECKING:
    from nanoengine.engine.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise AssertionError if an invariant of a scheduler, of its block manager or of their pool is broken."""
    manager = scheduler.block_manager
    pool = manager.pool
    manager.check()
    scheduler.decodes.check()
    drafts = scheduler.drafts or ()
    references = [0] * (pool.num_blocks + 1)
    for seq in scheduler.running:
        assert seq.status is Status.RUNNING
        assert seq.num_computed_tokens <= seq.num_tokens <= seq.max_num_tokens
        is_full = seq.num_tokens == seq.max_num_tokens and seq not in scheduler.held and seq not in drafts
        assert (seq in scheduler.complete) == is_full
        states = (seq in scheduler.begun, seq.decoding, seq in scheduler.complete, seq in scheduler.held, seq in drafts)
        assert sum(states) == 1
        manager.check_tables(seq)
        for table in seq.block_tables:
            for block in filter(None, table):  # but for the null block
                references[block] += 1
    for seq in [*scheduler.waiting, *scheduler.fetching]:
        assert seq.status is (Status.FETCHING if seq in scheduler.fetching else Status.WAITING)
        assert not seq.block_tables
        assert seq.prefix is None
        assert not seq.decoding
        assert seq.num_computed_tokens == 0
        assert seq.row == NO_ROW
    everybody = [*scheduler.waiting, *scheduler.fetching, *scheduler.running]
    assert dict(scheduler.shares.num_unfinished) == Counter(seq.client for seq in everybody)
    assert scheduler.held <= set(scheduler.running)
    assert scheduler.complete <= set(scheduler.running)
    assert set(scheduler.begun) <= set(scheduler.running)
    rows = [seq.row for seq in scheduler.running]
    assert sorted(rows + scheduler.free_rows) == list(range(scheduler.max_num_seqs)), "a row has one owner"
    on_their_way = Counter(
        seq for step in scheduler.in_flight for seq in [*step.decoded, *step.sampled] if not seq.finished
    )
    for step in scheduler.in_flight:
        for seq, run in zip(step.drafted, step.plan.drafted, strict=True):
            on_their_way[seq] += run.num_new
    for seq in [*scheduler.running, *scheduler.waiting]:
        assert seq.num_tokens - seq.num_known_tokens == on_their_way[seq]
    assert references == pool.ref_counts, "the references of the pool are those of the running sequences"
    assert len(scheduler.running) <= scheduler.max_num_seqs
    for seqs in (scheduler.running, scheduler.waiting, scheduler.begun):
        order = [seq.order for seq in seqs]
        assert order == sorted(order), "the first in order come first"
