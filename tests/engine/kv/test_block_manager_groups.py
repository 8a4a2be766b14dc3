"""What a sequence holds of each KV group, and what it shares."""

from __future__ import annotations

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.block_pool import NULL_BLOCK
from nanoengine.engine.kv.groups import CHUNKED, ENCODER, WINDOW, KVSpec, group_layers
from nanoengine.engine.messages import Entries
from tests.engine.kv.group_toys import FULL, PROMPT, SIX, begin, make, num_held, prefill
from tests.engine.kv.toys import make_sequence, run, snapshot, start, step, tell

ENC = KVSpec(ENCODER)

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
    assert forgotten == Entries(0, 1, 0, [NULL_BLOCK] * 2), "token 15 sees those from token 10 on"
    assert [(change.group, change.first) for change in grown] == [(0, 4), (1, 4)]
    assert {block for change in grown for block in change.block_ids} == set(before[1][:2])
    assert seq.block_tables[1] == [NULL_BLOCK, NULL_BLOCK, *before[1][2:], *grown[1].block_ids]
    assert num_held(seq) == [5, 3]


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
    assert changes[0] == Entries(0, 1, 0, [NULL_BLOCK]), "token 11 sees those from token 6 on"
    assert [(change.group, change.first) for change in changes[1:]] == [(0, 2), (1, 2)]
    own = [table[2] for table in parent.block_tables]
    transfers = step(manager).transfers
    assert [transfer.source.where for transfer in transfers] == [table[2] for table in shared]
    assert [transfer.target.where for transfer in transfers] == own
    assert child.block_tables == shared
    assert manager.pool.ref_counts[shared[1][0]] == 1, "the child has not forgotten it"
    assert [group.num_copied_blocks for group in manager.stats.groups] == [1, 1]
    tell(child, 6)
    assert manager.allocate_slots(child) == [Entries(0, 1, 0, [NULL_BLOCK])]
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
    known = list(manager.pool.prefixes())
    held = sum(kv is not None for prefix in known for kv in prefix.kv)
    children = sum(prefix.parent is not None for prefix in known)
    assert sum(prefix.num_uses for prefix in known) == held + children, "nobody stands on them any more"


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


def test_all_blocks_of_a_condemned_sequence_are_wiped_those_that_it_has_given_back_too() -> None:
    """Its prompt went by in chunks, each committed, before its logits showed that it is no number."""
    manager = BlockManager(30, 4, specs=(KVSpec(WINDOW, 6),), most_new_tokens=8)
    seq = make_sequence(0, range(33))
    assert manager.admit(seq) == 0
    had: set[int] = set()
    while seq.num_uncomputed_tokens:
        assert manager.allocate_slots(seq, num_lookahead=1) is not None
        had |= {block for block in seq.block_tables[0] if block != NULL_BLOCK}
        count = min(8, seq.num_uncomputed_tokens)
        manager.publish(seq, seq.num_computed_tokens + count, committed=False)
        seq.num_computed_tokens += count
        step(manager)
    manager.condemn(seq)
    manager._allocate(30)
    wiped = {transfer.target.where for transfer in step(manager).transfers if transfer.source.where == NULL_BLOCK}
    assert wiped == had
    assert len(had) == 9


def test_who_comes_back_to_what_its_former_self_computed_from_a_broken_promise_falls_too() -> None:
    """It holds nothing of the plan that fails: its window begins behind that. But what it holds was computed from it."""
    manager = BlockManager(20, 4, specs=(KVSpec(WINDOW, 6),), most_new_tokens=16)
    first = start(manager, 0, [1] * 5)
    manager.take_orders()
    second = start(manager, 1, [1] * 4 + [2] * 9)
    assert second.num_cached_tokens == 4
    manager.take_orders()
    manager.free(second)
    second.num_computed_tokens = 0
    assert manager.admit(second) == 12
    assert second.block_tables[0][:1] == [NULL_BLOCK]
    assert manager.rollback([first], [first, second]) == [first, second]
    for seq in (first, second):
        manager.discard(seq)
    assert list(manager.pool.prefixes()) == []


def test_nothing_is_left_of_what_a_sequence_that_is_gone_computed_from_a_broken_promise() -> None:
    """Neither its blocks nor their parents' copies were to be written by the plan that fails: an ancestor was."""
    manager = BlockManager(20, 4, specs=(FULL, KVSpec(WINDOW, 2)), most_new_tokens=16)
    run(manager, 0, [1] * 4 + [2] * 5)
    [head, tail] = manager.pool.parents_first()
    for kv in filter(None, head.kv):
        for block in kv.blocks:
            manager.pool.withdraw(block)
    first = start(manager, 1, [1] * 5)
    manager.take_orders()
    second = start(manager, 2, [1] * 4 + [2] * 4 + [3] * 5)
    assert second.num_cached_tokens == 8
    manager.take_orders()
    manager.free(second)
    assert manager.rollback([first], [first]) == [first]
    manager.discard(first)
    assert list(manager.pool.prefixes()) == [head, tail], "the beginning has no K/V, but what was sound behind it has"
