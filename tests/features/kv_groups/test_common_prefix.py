"""How many first blocks all decodes of a step share."""

from __future__ import annotations

from typing import Any

import numpy as np

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.messages import Run, StepPlan
from nanoengine.core.scheduler import Step
from nanoengine.features.kv_groups.common_prefix import CommonPrefix
from nanoengine.features.kv_groups.layouts import KVGroup


class Row:
    """What is looked at of a sequence."""

    def __init__(self, *tables: list[int]):
        self.block_tables = list(tables)


def make(*windows: int | None) -> tuple[CommonPrefix, BlockManager]:
    blocks = BlockManager(20, 4, [KVGroup(window, [0]).layout(64) for window in windows])
    return CommonPrefix(blocks), blocks


def counts(prefix: CommonPrefix, decodes: list[Any], starts: list[int], **more: Any) -> list[int]:
    """Of a step with these decodes, each with so many tokens before it."""
    drafted = more.pop("drafted", [])
    runs = [Run(row, start, 3, True, (1, 2)) for row, (_, start) in enumerate(drafted)]
    plan = StepPlan(decode_rows=np.arange(len(decodes)), decode_starts=np.array(starts, np.int32), runs=runs)
    step = Step(1, plan, decodes=decodes, runs=[seq for seq, _ in drafted], **more)
    prefix.complete(step)
    return plan.num_common_blocks


def share(blocks: BlockManager, *seqs: Row) -> None:
    for seq in seqs:
        for table in seq.block_tables:
            for block in table:
                blocks.ref_counts[block] += 1


def test_it_is_what_all_share_as_far_as_no_new_token_is_in_it() -> None:
    prefix, blocks = make(None)
    seqs = [Row([1, 2, 3, 4]), Row([1, 2, 3, 5]), Row([1, 2, 6])]
    share(blocks, *seqs)
    assert counts(prefix, seqs[:1], [14]) == []
    assert counts(prefix, seqs[:2], [14, 15]) == [3]
    assert counts(prefix, seqs, [14, 15, 9]) == [2]
    assert counts(prefix, [], []) == []
    assert counts(prefix, seqs[:1], [15], drafted=[(seqs[1], 7)]) == [1], "new tokens begin in the second block"


def test_newcomers_can_make_it_less_and_never_more() -> None:
    prefix, blocks = make(None)
    seqs = [Row([1, 2, 3, 4]), Row([1, 5, 3, 4]), Row([1, 2, 3, 6])]
    share(blocks, *seqs)
    assert counts(prefix, seqs[:2], [15, 15]) == [1]
    assert counts(prefix, seqs, [15, 15, 15]) == [1], "the newcomer has three in common with the first"


def test_tables_of_those_who_stayed_are_not_read_again() -> None:
    """With 256 decodes, of which one is new in a step, and a common prefix of 8,192 tokens, that would take 0.3 ms."""
    prefix, blocks = make(None)
    seqs = [Row([1, 2, 3]), Row([1, 2, 4]), Row([1, 2, 5]), Row([1, 2, 6])]
    share(blocks, *seqs)
    assert counts(prefix, seqs[:3], [9, 9, 9]) == [2]
    del seqs[2].block_tables
    assert counts(prefix, [seqs[1], seqs[2], seqs[3]], [9, 9, 9]) == [2]
    assert counts(prefix, seqs[1:3], [9, 9]) == [2]


def test_who_has_started_anew_is_counted_again_although_the_decodes_are_the_same() -> None:
    prefix, blocks = make(None)
    seqs = [Row([1, 2, 3]), Row([1, 2, 4])]
    share(blocks, *seqs)
    assert counts(prefix, seqs, [9, 9]) == [2]
    counts(prefix, [], [], started=seqs[1:], drafted=[(seqs[0], 9)])
    seqs[1].block_tables[0][:2] = [7, 8]  # it was computed again, into other blocks
    assert counts(prefix, seqs.copy(), [9, 9]) == [0]


def test_a_window_shares_nothing_since_its_first_blocks_are_given_back() -> None:
    prefix, blocks = make(None, 6)
    seqs = [Row([1, 2, 3], [5, 6, 7]), Row([1, 2, 4], [5, 6, 8])]
    share(blocks, *seqs)
    assert counts(prefix, seqs, [9, 9]) == [2, 0]
