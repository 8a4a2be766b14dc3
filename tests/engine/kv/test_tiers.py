"""What happens to blocks that the pool has no room for, and how they come back."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.block_pool import BlockPool
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.messages import Tier
from tests.engine.kv.toys import (
    B,
    evict,
    fetch_and_run,
    make_sequence,
    moves,
    num_cached,
    run,
    settle,
    start,
    step,
)

BYTES = 8  # of a block, as far as the disk tier knows
FILE = 280  # no file of it takes more
LONG, OTHER = [1] * 12, [2] * 13  # three blocks each, of a pool of four
DOWN, UP = (Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)


def make(num_blocks: int = 4, *, host: int = 0, disk: Path | None = None, files: int = 100) -> BlockManager:
    return BlockManager(
        num_blocks,
        B,
        host=HostTier(host) if host else None,
        disk=None if disk is None else DiskTier(disk, "model", BYTES, files * FILE),
        hash_seed=5,
    )


def swap(manager: BlockManager, seq_id: int, prompt: list[int]) -> int | None:
    """A sequence that computes its prompt and is swapped out; afterwards the pool is empty. Returns what it had found."""
    seq = start(manager, seq_id, prompt)
    settle(manager)
    manager.swap_out(seq)
    settle(manager)
    evict(manager)
    settle(manager)
    return seq.num_cached_tokens


def has_parent(name: str) -> bool:
    """Whether a file is that of a block behind others."""
    _, parent_hash, _ = name.split("-")
    return bool(parent_hash)


def test_without_tiers_what_is_evicted_is_gone() -> None:
    manager = make()
    assert [run(manager, i, prompt).num_cached_tokens for i, prompt in enumerate((LONG, OTHER, LONG))] == [0, 0, 0]


def test_what_is_evicted_is_copied_to_host_memory_and_back() -> None:
    manager = make(host=10)
    run(manager, 0, LONG)
    run(manager, 1, OTHER)
    seq = start(manager, 2, LONG)
    assert seq.num_cached_tokens == 8
    transfers = step(manager).transfers
    assert moves(transfers).count(UP) == manager.stats.num_loaded_blocks == 2
    assert manager.stats.hits_by_tier[Tier.HOST] == 8
    assert {load.target.where for load in transfers if load.target.tier is Tier.DEVICE} == set(seq.block_table[:2])


def test_a_disk_tier_without_host_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="needs a host tier"):
        make(disk=tmp_path)


def test_a_full_host_tier_turns_over_like_the_pool() -> None:
    """What the pool evicts now pushes out what it evicted longest ago."""
    manager = make(5, host=4)
    for number in range(6):
        run(manager, number, [number] * (2 * B + 1))
        evict(manager)
        step(manager)
    assert [num_cached(manager, [number] * (2 * B + 1)) for number in range(6)] == [0, 0, 0, 0, 8, 8]


def test_what_host_memory_pushes_out_goes_to_a_file(tmp_path: Path) -> None:
    manager = make(6, host=1, disk=tmp_path)
    run(manager, 0, [1] * 5)
    evict(manager)
    step(manager)
    run(manager, 1, [2] * 5)
    evict(manager)
    orders = step(manager)
    [write] = orders.writes
    [save] = orders.transfers
    assert write.source == save.target, "what is written is as it was before"
    assert write.header


def test_what_the_pool_still_has_is_not_written_when_host_memory_pushes_it_out(tmp_path: Path) -> None:
    manager = make(6, host=1, disk=tmp_path)
    for seq_id in range(2):
        seq = start(manager, seq_id, [seq_id] * 5)
        step(manager)
        manager.swap_out(seq)
        assert step(manager).writes == []
    evict(manager)
    assert len(step(manager).writes) == 1, "now it has not"


def test_an_eviction_goes_to_a_file_when_all_of_host_memory_is_in_use(tmp_path: Path) -> None:
    manager = make(host=1, disk=tmp_path)
    run(manager, 0, LONG)
    evict(manager)
    orders = step(manager)
    assert moves(orders.transfers) == [DOWN]
    assert [write.source.tier for write in orders.writes] == [Tier.DEVICE] * 2


def test_a_block_is_copied_down_once_and_not_each_time_it_is_evicted(tmp_path: Path) -> None:
    for options in ({"host": 20}, {"host": 1, "disk": tmp_path}):
        manager = make(**options)  # type: ignore[arg-type]
        for i in range(8):
            fetch_and_run(manager, i, LONG if i % 2 else OTHER)
        assert manager.stats.num_written_files <= 6
        if "disk" not in options:
            assert manager.stats.num_saved_blocks <= 6, "no more than there are different blocks"


@pytest.mark.parametrize("host", [1, 2])
def test_a_swapped_sequence_that_host_memory_cannot_hold_keeps_its_beginning_there(host: int) -> None:
    """The blocks behind a missing one are worth nothing."""
    manager = make(6, host=host)
    assert swap(manager, 0, [1] * 17) == 0
    assert num_cached(manager, [1] * 17) == host * B


def test_a_host_hit_is_the_last_to_be_pushed_out() -> None:
    manager = make(6, host=2)
    assert [swap(manager, i, [token] * 5) for i, token in enumerate((1, 2, 1, 3))] == [0, 0, B, 0]
    assert swap(manager, 4, [1] * 5) == B
    assert swap(manager, 5, [2] * 5) == 0


def test_after_a_hit_children_are_pushed_out_before_their_parents() -> None:
    """Else what is left of a chain could not be reached."""
    manager = make(host=3)
    run(manager, 0, [1] * 13)
    run(manager, 1, [2] * 13)
    assert run(manager, 2, [1] * 13).num_cached_tokens == 12
    seq = start(manager, 3, [3] * 5)
    step(manager)
    manager.swap_out(seq)
    step(manager)
    run(manager, 4, [4] * 13)
    assert run(manager, 5, [1] * 13).num_cached_tokens == 8


def test_a_hit_in_host_memory_puts_the_beginning_last_in_line() -> None:
    manager = make(4, host=6)
    seq = run(manager, 0, [1] * 13)
    evict(manager)
    step(manager)
    start(manager, 1, [1] * 13)
    assert manager.tiers.host is not None
    assert [kv.prefix.hash for kv in manager.tiers.host.entries.values()] == seq.block_hashes[::-1]


def test_after_a_hit_the_files_of_children_are_deleted_before_those_of_their_parents(tmp_path: Path) -> None:
    manager = make(5, host=4, disk=tmp_path, files=4)
    fetch_and_run(manager, 0, [1] * 13)
    manager.save_all()
    settle(manager)
    disk = manager.tiers.disk
    assert disk is not None
    disk.max_bytes = disk.num_bytes
    chain = list(disk.files)
    fetch_and_run(manager, 1, [1] * 13)
    assert list(disk.files) == chain, "children first, and so they stay"
    fetch_and_run(manager, 2, [2] * 5)
    manager.save_all()
    assert step(manager).deletes == [disk.path(chain[0])]
    assert [has_parent(name) for name in chain] == [True, True, False]


def test_chains_of_several_blocks_survive_a_turnover_of_both_tiers_from_their_beginning(tmp_path: Path) -> None:
    manager = make(5, host=4, disk=tmp_path)
    prompts = [[number] * 13 for number in range(8)]
    for round in range(3):
        for number, prompt in enumerate(prompts):
            seq = fetch_and_run(manager, 10 * round + number, prompt)
            assert seq.num_cached_tokens == (12 if round else 0)
    assert manager.stats.hits_by_tier[Tier.DISK] > 100


def test_without_prefix_caching_nothing_goes_down() -> None:
    manager = BlockManager(4, B, enable_prefix_caching=False, host=HostTier(4))
    seq = start(manager, 0, [1] * 9)
    step(manager)
    manager.swap_out(seq)
    assert step(manager).transfers == []
    assert manager.stats.num_saved_blocks == 0


def test_a_reset_forgets_all_tiers_and_has_the_files_deleted(tmp_path: Path) -> None:
    manager = make(host=2, disk=tmp_path)
    for i in range(4):
        fetch_and_run(manager, i, [i] * 13)
    assert manager.reset_prefix_cache()
    manager.check()
    assert len(settle(manager).deletes) > 0
    assert [fetch_and_run(manager, 9 + i, [i] * 13).num_cached_tokens for i in range(4)] == [0] * 4


def test_a_reset_while_swapped_sequences_wait_leaves_them_nothing_to_hit() -> None:
    manager = make(6, host=6)
    seqs = [start(manager, i, [i] * 9) for i in range(2)]
    step(manager)
    for seq in seqs:
        manager.swap_out(seq)
        seq.num_computed_tokens = 0
    assert manager.reset_prefix_cache(), "with their copies still on the way"
    step(manager)
    assert [manager.admit(seq) for seq in seqs] == [0, 0]
    assert num_cached(manager, [0] * 9) is None, "nothing is left of the pool"
    assert step(manager).transfers == []


def test_all_that_is_cached_is_saved_at_the_end_and_a_later_engine_finds_it(tmp_path: Path) -> None:
    manager = make(6, host=2, disk=tmp_path)
    fetch_and_run(manager, 0, LONG)
    fetch_and_run(manager, 1, OTHER)
    manager.save_all()
    orders = settle(manager)
    for write in orders.writes:
        Path(write.path).touch()  # the index believes in names
    disk = manager.tiers.disk
    assert disk is not None
    names = [Path(write.path).stem.split("-") for write in orders.writes]
    written = [hash for hash, _, _ in names]
    assert len(written) == 6
    for i, (_, parent_hash, _) in enumerate(names):
        assert not parent_hash or parent_hash in written[i + 1 :], "beginnings are written last: they are deleted last"

    later = make(6, host=6, disk=tmp_path)
    assert fetch_and_run(later, 0, [*OTHER, 7]).num_cached_tokens == 12
    assert fetch_and_run(later, 1, LONG).num_cached_tokens == 8


def test_where_room_is_short_beginnings_are_saved_first(tmp_path: Path) -> None:
    manager = make(6, host=6, disk=tmp_path, files=2)
    run(manager, 0, [1] * 21)
    manager.save_all()
    for write in step(manager).writes:
        Path(write.path).touch()
    assert fetch_and_run(make(6, host=6, disk=tmp_path), 1, [1] * 21).num_cached_tokens >= 8


def test_beginnings_get_what_room_host_memory_has() -> None:
    """All blocks of a prompt are evicted at once."""
    manager = make(6, host=2)
    run(manager, 0, [1] * 21)
    evict(manager)
    step(manager)
    assert num_cached(manager, [1] * 21) == 8


def test_nothing_is_saved_at_the_end_without_a_disk_or_before_it_is_written(tmp_path: Path) -> None:
    manager = make(host=2)
    run(manager, 0, LONG)
    manager.save_all()
    assert step(manager).writes == []
    manager = make(host=2, disk=tmp_path)
    start(manager, 0, LONG)
    manager.save_all()
    assert step(manager).writes == []


def test_a_block_that_is_not_written_yet_is_not_copied_down(tmp_path: Path) -> None:
    """Its plan may fail, and nobody would look for it in a lower tier then."""
    manager = make(host=4, disk=tmp_path)
    seq = start(manager, 0, LONG)
    manager.take_orders()
    manager.swap_out(seq)
    evict(manager)
    assert step(manager) == ([], [], [], [])
    assert num_cached(manager, LONG) == 0


def test_a_hash_collision_with_a_file_does_not_serve_foreign_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockPool, "hash_block", lambda *_: bytes(16))
    manager = make(host=2, disk=tmp_path)
    fetch_and_run(manager, 0, [1] * 6)
    manager.save_all()
    settle(manager)
    evict(manager)
    manager.reset_prefix_cache()
    asked = make_sequence(1, [2] * 6)
    if manager.fetch(asked):
        [read] = manager.take_orders().reads
        assert array("i", [2] * B).tobytes().hex().encode() in read.header
