"""What a sequence holds of each KV group, and what of each is found, lost, moved and shared."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoengine.engine.kv.block_manager import BlockManager, Change
from nanoengine.engine.kv.block_pool import NULL_BLOCK
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.events import BlockRemoved, BlockStored
from nanoengine.engine.kv.groups import CHUNKED, ENCODER, WINDOW, KVSpec, group_layers
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.messages import Tier
from tests.engine.kv.toys import B, ToySequence, evict, make_sequence, moves, num_cached, settle, snapshot, step, tell

FULL, SIX, ENC = KVSpec(), KVSpec(WINDOW, 6), KVSpec(ENCODER)
PROMPT = list(range(17))  # four blocks and a token


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


# ---- how many blocks


def test_what_a_sequence_of_gemma_3_270m_holds_from_its_first_chunk_to_its_last_token() -> None:
    """15 layers with a window of 512 tokens and 3 that see all; chunks of 512. Groups without windows would hold 6 x 2,048."""
    layers = [FULL if layer % 6 == 5 else KVSpec(WINDOW, 512) for layer in range(18)]
    specs = tuple(group.spec for group in group_layers(layers))
    assert [spec.forgets for spec in specs] == [True] * 5 + [False]
    manager = BlockManager(2_373, 16, specs=specs, most_new_tokens=512)
    seq = make_sequence(0, [token % 1000 for token in range(32_000)])
    assert manager.admit(seq) == 0
    held = []
    while seq.num_uncomputed_tokens:
        assert manager.allocate_slots(seq, num_lookahead=1) is not None
        held.append(num_held(seq))
        count = min(512, seq.num_uncomputed_tokens)
        manager.publish(seq, seq.num_computed_tokens + count, committed=False)
        seq.num_computed_tokens += count
        step(manager)
    # The full group has blocks for the prompt and a token from the start. A window begins with what fits two chunks; at the end
    # of the prompt there is not as much to come: before the last chunk 1,952 blocks of 2,001 are forgotten.
    assert len(held) == 63
    assert held == [[65] * 5 + [2001]] * 61 + [[65] * 5 + [2001], [49] * 5 + [2001]]
    seq.num_slots = 0  # the scheduler asks before the first token that it decodes
    held = []
    while seq.num_tokens < 32_768:
        tell(seq, 7)
        if seq.num_computed_tokens >= seq.num_slots:
            assert manager.allocate_slots(seq) is not None
            held.append(num_held(seq))
        seq.num_computed_tokens += 1
    # Each token sees itself and 511 before it: in 33 blocks, when it is the first in its own.
    assert held == [[33] * 5 + [count] for count in range(2001, 2049)]
    assert [len(table) for table in seq.block_tables] == [2048] * 6
    assert manager.pool.num_free == 2_373 - 5 * 33 - 2048
    manager.free(seq)
    manager.check()


def test_the_whole_sequence_must_fit_with_what_it_has_at_once_in_each_group() -> None:
    """29 tokens and one to come: 8 blocks, and a window of 6 with chunks of 4 never has more than 9 tokens in 4 blocks."""
    for num_blocks, cached in ((11, None), (12, 0)):
        manager = make(num_blocks=num_blocks)
        seq = make_sequence(0, [1] * 29)
        assert manager.admit(seq) == cached
    assert num_held(seq) == [8, 4]
    prefill(manager, seq)
    assert manager.pool.num_blocks == 12


def test_a_chunk_is_forgotten_as_a_whole() -> None:
    """Attention chunks of 8 tokens, prompt chunks of 4."""
    manager = make(KVSpec(CHUNKED, 8))
    seq = begin(manager, 0, [1] * 21)
    firsts = []
    while seq.num_uncomputed_tokens:
        assert manager.allocate_slots(seq, num_lookahead=1) is not None
        firsts.append((seq.num_computed_tokens, seq.first_blocks[0]))
        seq.num_computed_tokens = min(seq.num_computed_tokens + 4, 21)
    assert firsts == [(0, 0), (4, 0), (8, 2), (12, 2), (16, 4), (20, 4)]
    assert manager.stats.groups[0].num_forgotten_blocks == 4


def test_what_is_forgotten_becomes_the_null_block_and_is_room_for_what_comes() -> None:
    manager = make(num_blocks=8)
    seq = begin(manager, 0, [1] * 15)
    seq.num_computed_tokens = 15
    tell(seq, 9)
    before = [list(table) for table in seq.block_tables]
    assert num_held(seq) == [4, 4]
    assert manager.pool.num_free == 0
    pool = snapshot(manager.pool)
    assert manager.allocate_slots(seq, num_lookahead=5) is None, "two blocks more of each group; only two are forgotten"
    assert snapshot(manager.pool) == pool
    assert seq.block_tables == before
    changes = manager.allocate_slots(seq, num_lookahead=1)
    assert changes is not None
    forgotten, *grown = changes
    assert forgotten == Change(1, 0, [NULL_BLOCK] * 2), "token 15 sees those from token 10 on"
    assert [(change.group, change.first) for change in grown] == [(0, 4), (1, 4)]
    assert {block for change in grown for block in change.block_ids} == set(before[1][:2])
    assert seq.block_tables[1] == [NULL_BLOCK, NULL_BLOCK, *before[1][2:], *grown[1].block_ids]
    assert num_held(seq) == [5, 3]


# ---- hits


@pytest.mark.parametrize(
    ("lost", "hit"),
    [
        ({}, 4),
        ({1: [0]}, 4),  # behind four blocks, a window of 6 sees the last two
        ({1: [0, 1]}, 4),
        ({1: [3]}, 3),
        ({1: [2]}, 2),
        ({1: [0, 2]}, 0),  # behind two blocks it would see the first one
        ({1: [1, 2]}, 1),
        ({1: [0, 3]}, 3),
        ({1: [1, 3]}, 1),
        ({1: [0, 1, 2, 3]}, 0),
        ({0: [3]}, 3),
        ({0: [3], 1: [1]}, 1),
        ({0: [1], 1: [2]}, 1),
        ({0: [0]}, 0),
        ({0: [2], 1: [0, 3]}, 0),  # behind two blocks the window lacks the first
    ],
)
def test_a_hit_ends_where_every_group_has_what_the_next_token_sees(lost: dict[int, list[int]], hit: int) -> None:
    manager = make()
    owner = serve(manager, 0, PROMPT)
    assert [len(found) for group in (0, 1) for found in copies(manager, owner, group)] == [1] * 8
    for group, indices in lost.items():
        lose(manager, owner, group, *indices)
    expected = [copies(manager, owner, group) for group in (0, 1)]
    seq = begin(manager, 1, PROMPT)
    assert seq.num_cached_tokens == hit * B
    first = max(hit - 2, 0)
    assert seq.first_blocks == [0, first]
    assert [(block,) for block in seq.block_tables[0][:hit]] == expected[0][:hit]
    assert seq.block_tables[1][:first] == [NULL_BLOCK] * first
    assert [(block,) for block in seq.block_tables[1][first:hit]] == expected[1][first:hit]
    assert [group.num_hit_blocks for group in manager.stats.groups] == [hit, hit - first]
    assert manager.stats.num_hit_tokens == hit * B
    prefill(manager, seq)
    manager.check()


def test_what_sequences_have_forgotten_is_evicted_before_what_they_still_see() -> None:
    """So a hit outlives the beginnings of its windows; only they are said to be removed."""
    manager = make(num_blocks=24)
    owner = serve(manager, 0, PROMPT)
    num_forgotten = manager.stats.groups[1].num_forgotten_blocks
    assert num_forgotten == 2
    manager.drain_events()
    evict(manager, len(manager.pool.empty_blocks) + num_forgotten)
    assert manager.drain_events() == [BlockRemoved(hash, 1) for hash in owner.block_hashes[:2]]
    assert [group.num_evicted_blocks for group in manager.stats.groups] == [0, 2]
    assert manager.stats.num_evicted_blocks == 2
    assert copies(manager, owner, 1)[:2] == [(), ()]
    assert num_cached(manager, PROMPT) == 16


def test_each_group_tells_what_it_stores_and_the_index_outlives_what_it_loses() -> None:
    manager = make()
    owner = serve(manager, 0, PROMPT)
    events = manager.drain_events()
    assert all(isinstance(event, BlockStored) for event in events)
    told = [(event.hash, event.group) for event in events if isinstance(event, BlockStored)]
    assert told == [(hash, group) for hash in owner.block_hashes for group in (0, 1)]
    lose(manager, owner, 0, 0, 1, 2, 3)
    lose(manager, owner, 1, 0, 1, 2)
    assert len(manager.pool.index) == 4, "the window of the last block stands on all before it"
    assert manager.cached_blocks() == [
        BlockStored(owner.block_hashes[3], owner.block_hashes[2], owner.block_tokens[3], 1)
    ]
    lose(manager, owner, 1, 3)
    assert not manager.pool.index
    assert num_cached(manager, PROMPT) == 0


def test_a_running_sequence_publishes_behind_what_nobody_has_any_more() -> None:
    """A window's beginning is evicted while its owner runs; what that computes next is found by those who need it."""
    manager = make(SIX, num_blocks=12)
    seq = begin(manager, 0, [1] * 33)
    prefill(manager, seq)
    others = manager.pool.allocate(manager.pool.num_free)
    manager.pool.release(others)
    assert copies(manager, seq, 0)[:6] == [()] * 6
    for _ in range(4):
        tell(seq, 5)
        assert manager.allocate_slots(seq) is not None
        seq.num_computed_tokens += 1
    manager.free(seq)
    assert num_cached(manager, [1] * 33 + [5] * 4) == 36


# ---- lower tiers


def test_a_swap_saves_what_each_group_still_sees_and_loads_it_again() -> None:
    manager = make(host=8)
    seq = begin(manager, 0, PROMPT)
    prefill(manager, seq)
    manager.swap_out(seq)
    seq.num_computed_tokens = 0
    assert len(moves(settle(manager).transfers)) == 4 + 2
    evict(manager)
    settle(manager)
    assert manager.admit(seq) == 16
    assert [group.num_saved_blocks for group in manager.stats.groups] == [4, 4], (
        "those that it had forgotten when evicted"
    )
    assert [group.num_loaded_blocks for group in manager.stats.groups] == [4, 2]
    assert manager.stats.num_loaded_blocks == 6
    assert manager.stats.hits_by_tier[Tier.HOST] == 16
    targets = [transfer.target.where for transfer in settle(manager).transfers if transfer.target.tier is Tier.DEVICE]
    assert sorted(targets) == sorted(seq.block_tables[0][:4] + seq.block_tables[1][2:4])


def test_a_hit_may_be_in_the_pool_for_one_group_and_in_host_memory_for_another() -> None:
    manager = make(host=8)
    seq = begin(manager, 0, PROMPT)
    prefill(manager, seq)
    manager.swap_out(seq)
    settle(manager)
    lose(manager, seq, 1, 2, 3)
    again = begin(manager, 1, PROMPT)
    assert again.num_cached_tokens == 16
    assert [group.num_loaded_blocks for group in manager.stats.groups] == [0, 2]
    assert manager.stats.hits_by_tier == {Tier.DEVICE: 8, Tier.HOST: 8, Tier.DISK: 0}


def test_files_of_a_group_are_read_only_as_far_as_its_next_token_sees(tmp_path: Path) -> None:
    manager = make(host=20, disk=tmp_path)
    serve(manager, 0, PROMPT)
    manager.save_all()
    orders = settle(manager)
    assert len(orders.writes) == 8
    assert [group.num_written_files for group in manager.stats.groups] == [4, 4]
    for write in orders.writes:
        Path(write.path).touch()  # the index believes in names

    later = make(host=20, disk=tmp_path)
    seq = make_sequence(0, PROMPT)
    assert later.fetch(seq)
    assert len(settle(later).reads) == 6
    assert [group.num_read_files for group in later.stats.groups] == [4, 2]
    assert later.admit(seq) == 16
    assert later.stats.hits_by_tier[Tier.DISK] == 16
    assert seq.first_blocks == [0, 2]


def test_where_a_groups_file_is_missing_the_files_of_a_shorter_hit_are_read(tmp_path: Path) -> None:
    manager = make(host=20, disk=tmp_path)
    serve(manager, 0, PROMPT)
    manager.save_all()
    writes = settle(manager).writes
    hashes = make_sequence(1, PROMPT)
    assert manager.admit(hashes) == 16
    missing = f"{hashes.block_hashes[3].hex()}-{hashes.block_hashes[2].hex()}-1"
    for write in writes:
        if Path(write.path).stem != missing:
            Path(write.path).touch()
    later = make(host=20, disk=tmp_path)
    seq = make_sequence(0, PROMPT)
    assert later.fetch(seq)
    settle(later)
    assert [group.num_read_files for group in later.stats.groups] == [3, 2]
    assert later.admit(seq) == 12
    assert seq.first_blocks == [0, 1]


# ---- sharing


def test_a_fork_copies_the_shared_tail_of_every_group_before_it_is_written_to() -> None:
    manager = make()
    parent = begin(manager, 0, [1] * 11)
    prefill(manager, parent)
    child = make_sequence(1, [1] * 11)
    child.num_computed_tokens = 11
    manager.fork(parent, child)
    assert child.first_blocks == parent.first_blocks == [0, 0]
    shared = [list(table) for table in child.block_tables]
    tell(parent, 5)
    changes = manager.allocate_slots(parent)
    assert changes is not None
    assert changes[0] == Change(1, 0, [NULL_BLOCK]), "token 11 sees those from token 6 on"
    assert [(change.group, change.first) for change in changes[1:]] == [(0, 2), (1, 2)]
    own = [table[2] for table in parent.block_tables]
    transfers = step(manager).transfers
    assert [transfer.source.where for transfer in transfers] == [table[2] for table in shared]
    assert [transfer.target.where for transfer in transfers] == own
    assert child.block_tables == shared
    assert manager.pool.ref_counts[shared[1][0]] == 1, "the child has not forgotten it"
    assert [group.num_copied_blocks for group in manager.stats.groups] == [1, 1]
    tell(child, 6)
    assert manager.allocate_slots(child) == [Change(1, 0, [NULL_BLOCK])]
    for seq in (parent, child):
        manager.free(seq)
    manager.check()
    assert manager.pool.num_free == manager.pool.num_blocks


def test_beams_take_the_tables_of_one_of_them_in_every_group() -> None:
    manager = make()
    beams = [begin(manager, 0, [1] * 11)]
    prefill(manager, beams[0])
    beams.append(make_sequence(1, [1] * 11))
    beams[1].num_computed_tokens = 11
    manager.fork(beams[0], beams[1])
    for token, beam in enumerate(beams):
        for _ in range(6):
            tell(beam, token)
            assert manager.allocate_slots(beam) is not None
            beam.num_computed_tokens += 1
    lost = [block for table in beams[1].block_tables for block in table[3:]]
    manager.refork(beams, [beams[0], beams[0]])  # type: ignore[arg-type]
    assert beams[1].block_tables == beams[0].block_tables
    assert beams[1].first_blocks == beams[0].first_blocks == [0, 2]
    assert [manager.pool.ref_counts[block] for table in beams[0].block_tables for block in table if block] == [2] * 8
    assert [manager.pool.ref_counts[block] for block in lost] == [0] * 4
    for beam in beams:
        manager.free(beam)
    manager.check()
    assert manager.pool.num_free == manager.pool.num_blocks


def test_common_prefix_blocks_are_told_for_groups_that_keep_them() -> None:
    manager = make(FULL, SIX, FULL, ENC)
    seqs = []
    for seq_id, tail in enumerate(([1] * 5, [2] * 5, [3] * 7)):
        seq = begin(manager, seq_id, PROMPT[:12] + tail)
        prefill(manager, seq)
        seqs.append(seq)
    assert manager.get_num_common_prefix_blocks(seqs) == [3, 0, 3, 0]  # type: ignore[arg-type]
    assert manager.get_num_common_prefix_blocks(seqs[:1]) == [4, 0, 4, 0]  # type: ignore[arg-type]
    assert manager.get_num_common_prefix_blocks([]) == [0, 0, 0, 0]


def test_blocks_of_an_encoder_are_as_many_as_its_tokens_need_and_nobody_hits_them() -> None:
    manager = make(FULL, ENC)
    seq = make_sequence(0, PROMPT)
    seq.num_encoder_tokens = 9
    assert manager.admit(seq) == 0
    seq.num_computed_tokens = 0
    assert num_held(seq) == [5, 3]
    own = list(seq.block_tables[1])
    prefill(manager, seq)
    for _ in range(9):
        tell(seq, 1)
        assert manager.allocate_slots(seq) is not None
        seq.num_computed_tokens += 1
    assert seq.block_tables[1] == own
    assert all(manager.pool.contents[block] is None for block in own)
    child = make_sequence(1, seq.token_ids)
    child.num_computed_tokens, child.num_encoder_tokens = seq.num_tokens, 9
    manager.fork(seq, child)
    assert child.block_tables[1] == own
    assert [manager.pool.ref_counts[block] for block in own] == [2, 2, 2]
    tell(child, 2)
    assert manager.allocate_slots(child) is not None
    assert child.block_tables[1] == own, "they are read, never written to again"
    manager.free(seq)
    assert [manager.pool.ref_counts[block] for block in own] == [1, 1, 1]
    other = make_sequence(2, PROMPT)
    other.num_encoder_tokens = 9
    assert manager.admit(other) == 16
    assert not set(other.block_tables[1]) & set(own), "what it makes of its own input"
    for seq in (child, other):
        manager.free(seq)
    manager.check()
    assert manager.pool.num_free == manager.pool.num_blocks


# ---- failures


def test_who_has_given_back_what_was_never_written_falls_too() -> None:
    """It has computed from it; nothing that it holds now says so."""
    manager = make(SIX, most_new=12)
    first = begin(manager, 0, [1] * 9)
    manager.publish(first, 9, committed=False)
    first.num_computed_tokens = 9
    manager.take_orders()
    second = begin(manager, 1, [1] * 8 + [2] * 20)
    assert second.num_cached_tokens == 8
    manager.publish(second, 20, committed=False)
    second.num_computed_tokens = 20
    manager.take_orders()
    assert manager.allocate_slots(second, num_lookahead=1) is not None
    assert not set(first.block_tables[0]) & set(filter(None, second.block_tables[0]))
    innocent = begin(manager, 2, [3] * 9)
    assert manager.rollback([first], [first, second, innocent]) == [first, second]
    for seq in (first, second):
        manager.discard(seq)
    manager.check()
    assert num_cached(manager, [1] * 8 + [2] * 20) == 0


def test_who_has_given_back_what_was_written_goes_on() -> None:
    manager = make(SIX, most_new=12)
    first = begin(manager, 0, [1] * 9)
    prefill(manager, first)
    second = begin(manager, 1, [1] * 8 + [2] * 20)
    manager.publish(second, 20, committed=False)
    second.num_computed_tokens = 20
    manager.take_orders()
    assert manager.allocate_slots(second, num_lookahead=1) is not None
    manager.commit()
    manager.take_orders()
    assert manager.rollback([first], [first, second]) == [first]


def test_condemned_beginnings_are_found_in_no_group(tmp_path: Path) -> None:
    manager = make(host=20, disk=tmp_path)
    seq = begin(manager, 0, PROMPT)
    prefill(manager, seq)
    manager.save_all()
    writes = settle(manager).writes
    manager.condemn(seq)
    manager.check()
    assert not manager.pool.index
    assert sorted(settle(manager).deletes) == sorted(write.path for write in writes)
    assert len(writes) == 8
    assert num_cached(manager, PROMPT) == 0
