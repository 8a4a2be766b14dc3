"""What decodes share is counted when somebody comes, and is what the block manager would count for all."""

from __future__ import annotations

import numpy as np

from nanoengine.engine.common_blocks import CommonBlocks
from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.messages import Decodes, Drafted, StepPlan
from nanoengine.engine.sequence import Sequence
from tests.engine.toys import make_sequence

PLAN = StepPlan()


def running(manager: BlockManager, *prompts: list[int]) -> list[Sequence]:
    """Sequences whose prompts are computed."""
    seqs = []
    for seq_id, prompt in enumerate(prompts):
        seq = make_sequence(seq_id, prompt)
        assert manager.admit(seq) is not None
        manager.publish(seq, len(prompt))
        seq.num_computed_tokens = len(prompt)
        seq.num_tokens = len(prompt) + 1
        seqs.append(seq)
    return seqs


def test_it_is_what_all_share() -> None:
    manager = BlockManager(64, 2)
    shared = [1, 2, 3, 4, 5, 6]
    a, b, c, d = running(manager, [*shared, 7], [*shared, 8], [*shared[:4], 9, 9, 9], [3, 3, 3])
    common = CommonBlocks(manager)
    for seqs in ([a, b], [a, b, c], [b, c], [a, b, c, d], [d], [a, b], [c, a]):
        expected = manager.get_num_common_prefix_blocks(seqs) if len(seqs) > 1 else []
        counted = common.count(PLAN, seqs, [])
        # Who has left may have shared less than those who stay: that is found out when somebody comes.
        assert counted == expected or (counted and counted <= expected)
    assert CommonBlocks(manager).count(PLAN, [a, b], []) == [3]
    assert CommonBlocks(manager).count(PLAN, [a, b, c], []) == [2]
    assert CommonBlocks(manager).count(PLAN, [], []) == []


def test_the_same_decodes_are_not_counted_again() -> None:
    manager = BlockManager(64, 2)
    seqs = running(manager, [1, 2, 3, 4, 5], [1, 2, 3, 4, 6])
    calls: list[list[Sequence]] = []
    count = manager.get_num_common_prefix_blocks
    manager.get_num_common_prefix_blocks = lambda own: calls.append(own) or count(own)  # type: ignore[method-assign, func-returns-value]
    common = CommonBlocks(manager)
    assert [common.count(PLAN, seqs, []) for _ in range(3)] == [[2]] * 3
    assert len(calls) == 1


def test_new_tokens_of_a_run_with_drafts_are_in_no_shared_block() -> None:
    manager = BlockManager(64, 2)
    seqs = running(manager, [1, 2, 3, 4, 5], [1, 2, 3, 4, 6])
    for seq in seqs:
        seq.num_computed_tokens += 9
    drafted = [Drafted(0, 3, (5, 6, 7)), Drafted(1, 5, (5,))]
    assert CommonBlocks(manager).count(StepPlan(drafted=drafted), [], seqs) == [1], "one has computed three tokens"
    decodes = Decodes(np.array([0], np.int32), np.array([1], np.int32))
    assert CommonBlocks(manager).count(StepPlan(decodes=decodes, drafted=drafted[1:]), seqs[:1], seqs[1:]) == [0]
    assert CommonBlocks(manager).count(StepPlan(drafted=drafted[:1]), [], seqs[:1]) == []
