"""What happens to blocks that the pool has no room for; the copies are made by the toy model, whose slots show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.block_pool import BlockPool
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.kv.kv_file import BadKVFile, read_kv_file, write_kv_file
from nanoengine.engine.kv.tiers import LowerTiers
from nanoengine.engine.messages import Place, SampledBatch, ScheduledBatch, Tier
from nanoengine.engine.scheduler import Scheduler
from nanoengine.engine.sequence import Sequence
from tests.engine.toys import ToyModel, assert_idle, continuation, drain, make_sequence

B = 4
BYTES = 8  # of a block, as far as the disk tier knows
FILE = 210  # about what a file of it takes


class ToyWithFiles(ToyModel):
    """Its files are there, and as sound as real ones; only what they hold is kept elsewhere."""

    def execute(self, batch: ScheduledBatch) -> SampledBatch:
        if not self.fail_if(batch):
            for transfer in batch.transfers:
                if transfer.target.tier is Tier.DISK:
                    write_kv_file(Path(str(transfer.target.where)), transfer.header, bytes(BYTES))
        return super().execute(batch)

    def _read(self, place: Place) -> dict[int, int]:
        if place.tier is Tier.DISK:
            read_kv_file(Path(str(place.where)))
        return super()._read(place)


def make(num_blocks: int = 4, *, host: int = 0, disk: Path | None = None, files: int = 100) -> Scheduler:
    tiers = LowerTiers(
        HostTier(host) if host else None,
        None if disk is None else DiskTier(disk, "model", BYTES, files * FILE),
    )
    return Scheduler(
        BlockManager(num_blocks, B, tiers=tiers, hash_seed=5),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=num_blocks * B,
    )


def run(scheduler: Scheduler, model: ToyModel, seq_id: int, prompt: list[int], max_tokens: int = 2) -> Sequence:
    """One request from beginning to end, with the right tokens."""
    seq = make_sequence(seq_id, prompt, max_tokens=max_tokens)
    scheduler.add(seq)
    drain(scheduler, model)
    assert seq.output_token_ids == continuation(prompt, max_tokens)
    assert_idle(scheduler)
    return seq


def moves(batches: list[ScheduledBatch]) -> list[tuple[Tier, Tier]]:
    return [(transfer.source.tier, transfer.target.tier) for batch in batches for transfer in batch.transfers]


LONG, OTHER = [1] * 12, [2] * 13  # three blocks each, of a pool of four


def test_without_tiers_what_is_evicted_is_gone() -> None:
    scheduler, model = make(), ToyWithFiles()
    run(scheduler, model, 0, LONG)
    run(scheduler, model, 1, OTHER)
    assert run(scheduler, model, 2, LONG).num_cached_tokens == 0
    assert moves(model.batches) == []


def test_what_is_evicted_is_copied_to_host_memory_and_back() -> None:
    scheduler, model = make(host=10), ToyWithFiles()
    run(scheduler, model, 0, LONG)
    run(scheduler, model, 1, OTHER)
    assert run(scheduler, model, 2, LONG).num_cached_tokens == 8
    tiers = scheduler.block_manager.tiers
    assert tiers.num_loaded_blocks == moves(model.batches).count((Tier.HOST, Tier.DEVICE)) > 0
    assert tiers.num_saved_blocks == moves(model.batches).count((Tier.DEVICE, Tier.HOST)) > 0
    assert scheduler.block_manager.stats.hits_by_tier[Tier.HOST] == tiers.num_loaded_blocks * B


def test_without_host_memory_what_is_evicted_goes_to_a_file_and_back(tmp_path: Path) -> None:
    scheduler, model = make(disk=tmp_path), ToyWithFiles()
    run(scheduler, model, 0, LONG)
    run(scheduler, model, 1, OTHER)
    assert run(scheduler, model, 2, LONG).num_cached_tokens == 8
    assert (Tier.DEVICE, Tier.DISK) in moves(model.batches)
    assert (Tier.DISK, Tier.DEVICE) in moves(model.batches)
    assert scheduler.block_manager.stats.hits_by_tier[Tier.DISK] > 0


def test_an_eviction_goes_to_a_file_when_host_memory_is_full(tmp_path: Path) -> None:
    scheduler, model = make(host=1, disk=tmp_path), ToyWithFiles()
    run(scheduler, model, 0, LONG)
    run(scheduler, model, 1, OTHER)
    assert moves(model.batches).count((Tier.DEVICE, Tier.HOST)) == 1
    assert moves(model.batches).count((Tier.DEVICE, Tier.DISK)) >= 1
    assert run(scheduler, model, 2, LONG).num_cached_tokens == 8


def test_a_block_is_copied_to_a_tier_once_and_not_each_time_it_is_evicted(tmp_path: Path) -> None:
    for options in ({"host": 20}, {"disk": tmp_path}):
        scheduler, model = make(**options), ToyWithFiles()
        for i in range(8):
            run(scheduler, model, i, LONG if i % 2 else OTHER)
        down = [move for move in moves(model.batches) if move[0] is Tier.DEVICE]
        assert len(down) <= 8, "no more than there are different blocks"


def test_a_hit_may_come_from_all_tiers_at_once(tmp_path: Path) -> None:
    scheduler, model = make(6, host=1, disk=tmp_path), ToyWithFiles()
    prompt = [1] * 21
    run(scheduler, model, 0, prompt)
    manager = scheduler.block_manager
    manager.pool.release(manager.pool.allocate(4))  # the tail goes: one block to host memory, the others to files
    again = run(scheduler, model, 1, prompt)
    assert again.num_cached_tokens == 20
    hits = manager.stats.hits_by_tier
    assert all(hits[tier] > 0 for tier in Tier)
    assert sum(hits.values()) == 20


@pytest.mark.parametrize("host", [1, 2])
def test_a_swapped_sequence_that_host_memory_cannot_hold_keeps_its_beginning_there(host: int) -> None:
    """The blocks behind a missing one are worth nothing."""
    manager = BlockManager(6, B, tiers=LowerTiers(HostTier(host)))
    seq = make_sequence(0, [1] * 17)
    manager.admit(seq)
    seq.num_computed_tokens = 17
    manager.swap_out(seq)
    manager.take_transfers()
    manager.commit()
    manager.pool.release(manager.pool.allocate(6))
    assert manager.admit(make_sequence(1, [1] * 17)) == host * B


def test_a_save_pushes_out_the_oldest_and_that_goes_to_a_file(tmp_path: Path) -> None:
    manager = BlockManager(6, B, tiers=LowerTiers(HostTier(1), DiskTier(tmp_path, "model", BYTES, 10 * FILE)))
    for seq_id in range(2):
        seq = make_sequence(seq_id, [seq_id] * 5)
        manager.admit(seq)
        seq.num_computed_tokens = 5
        manager.swap_out(seq)
    first, to_file, second = manager.take_transfers()
    assert (first.source.tier, first.target.tier) == (Tier.DEVICE, Tier.HOST)
    assert (to_file.source, to_file.target.tier) == (first.target, Tier.DISK)
    assert second.target == first.target, "its slot is read before it is written again"
    assert to_file.header


def test_a_host_hit_is_the_last_to_be_pushed_out() -> None:
    manager = BlockManager(6, B, tiers=LowerTiers(HostTier(2)))

    def swap(seq_id: int, token: int) -> int | None:
        seq = make_sequence(seq_id, [token] * 5)
        cached = manager.admit(seq)
        seq.num_computed_tokens = 5
        manager.swap_out(seq)
        manager.take_transfers()
        manager.commit()
        manager.pool.release(manager.pool.allocate(6))
        return cached

    assert [swap(0, 1), swap(1, 2), swap(2, 1), swap(3, 3)] == [0, 0, B, 0]
    assert swap(4, 1) == B
    assert swap(5, 2) == 0


def test_without_prefix_caching_nothing_goes_down() -> None:
    tiers = LowerTiers(HostTier(4))
    manager = BlockManager(4, B, enable_prefix_caching=False, tiers=tiers)
    seq = make_sequence(0, [1] * 9)
    manager.admit(seq)
    seq.num_computed_tokens = 9
    manager.swap_out(seq)
    assert manager.take_transfers() == []
    assert tiers.num_saved_blocks == 0


def test_what_a_failed_step_was_to_copy_down_is_never_served(tmp_path: Path) -> None:
    for options in ({"host": 10}, {"disk": tmp_path}):
        scheduler, model = make(**options), ToyWithFiles()
        run(scheduler, model, 0, LONG)
        model.fail_if = lambda batch: bool(batch.transfers)
        scheduler.add(make_sequence(1, OTHER))
        batch = scheduler.schedule()
        assert batch.transfers
        with pytest.raises(RuntimeError):
            model.execute(batch)
        scheduler.fail()
        scheduler.check()
        model.fail_if = lambda _: False
        run(scheduler, model, 2, LONG)
        run(scheduler, model, 3, OTHER)


def test_what_a_failed_step_was_to_copy_up_stays_where_it_was(tmp_path: Path) -> None:
    for options in ({"host": 10}, {"disk": tmp_path}):
        scheduler, model = make(**options), ToyWithFiles()
        run(scheduler, model, 0, LONG)
        run(scheduler, model, 1, OTHER)
        model.fail_if = lambda batch: any(transfer.target.tier is Tier.DEVICE for transfer in batch.transfers)
        scheduler.add(make_sequence(2, LONG))
        with pytest.raises(RuntimeError):
            model.execute(scheduler.schedule())
        scheduler.fail()
        assert scheduler.block_manager.tiers.num_loaded_blocks > 0
        model.fail_if = lambda _: False
        assert run(scheduler, model, 3, LONG).num_cached_tokens


def test_a_file_lost_after_it_was_found_sound_fails_one_step_only(tmp_path: Path) -> None:
    """Another process may delete files of a shared folder; a second attempt computes what is lost."""
    scheduler, model = make(disk=tmp_path), ToyWithFiles()
    run(scheduler, model, 0, LONG)
    run(scheduler, model, 1, OTHER)
    for file in tmp_path.rglob("*.kv"):
        file.unlink()
    scheduler.add(make_sequence(2, LONG))
    with pytest.raises(BadKVFile):
        model.execute(scheduler.schedule())
    scheduler.fail()
    scheduler.check()
    run(scheduler, model, 3, LONG)


def test_a_reset_forgets_all_tiers(tmp_path: Path) -> None:
    scheduler, model = make(host=2, disk=tmp_path), ToyWithFiles()
    run(scheduler, model, 0, LONG)
    run(scheduler, model, 1, OTHER)
    assert scheduler.block_manager.reset_prefix_cache()
    scheduler.check()
    assert run(scheduler, model, 2, LONG).num_cached_tokens == 0
    assert run(scheduler, model, 3, OTHER).num_cached_tokens == 0


def test_the_last_batch_writes_all_that_is_cached_and_a_later_engine_finds_it(tmp_path: Path) -> None:
    scheduler, model = make(host=2, disk=tmp_path), ToyWithFiles()
    run(scheduler, model, 0, LONG)
    run(scheduler, model, 1, OTHER)
    last = scheduler.last_batch()
    assert len(last) == 0
    model.execute(last)

    later, new_model = make(disk=tmp_path), ToyWithFiles()
    new_model.elsewhere = dict(model.elsewhere)
    assert run(later, new_model, 0, [*OTHER, 7]).num_cached_tokens == 12
    assert run(later, new_model, 1, LONG).num_cached_tokens == 8


def test_the_last_batch_of_an_engine_without_disk_is_empty() -> None:
    scheduler, model = make(host=2), ToyWithFiles()
    run(scheduler, model, 0, LONG)
    assert scheduler.last_batch().transfers == []


def test_a_hash_collision_with_a_file_does_not_serve_foreign_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockPool, "hash_block", lambda *_: bytes(16))
    scheduler, model = make(disk=tmp_path), ToyWithFiles()
    run(scheduler, model, 0, [1] * 6)
    run(scheduler, model, 1, [2] * 13)
    run(scheduler, model, 2, [3] * 6)
