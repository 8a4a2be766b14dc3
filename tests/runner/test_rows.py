"""Rows: only what has changed is sent, and what the device keeps is what the plans say."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.engine.kv.block_pool import NULL_BLOCK
from nanoengine.engine.messages import Chunk, Entries, Started, StepPlan
from nanoengine.runner.rows import Rows
from nanoengine.runner.stream import CpuStream
from tests.engine.toys import FAST
from tests.runner.fake_stream import FakeStream
from tests.runner.plans import decodes, sampling, start
from tests.runner.random_plans import RandomPlans

NUM_ROWS, WIDTH = 4, 6


class Watched(FakeStream):
    """Keep the sizes of what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        self.sent.append(size)
        return super().host_tensor(size, dtype)


@pytest.fixture
def rows() -> Rows:
    return Rows(NUM_ROWS, 1, WIDTH, Watched())


def apply(rows: Rows, **changes: Any) -> list[int]:
    """Make some changes; returns the sizes of what was sent."""
    assert isinstance(rows.stream, Watched)
    rows.stream.sent = []
    rows.apply(StepPlan(**changes))
    return rows.stream.sent


def table(rows: Rows, row: int) -> list[int]:
    return rows.tables[0][row].tolist()


# ---- block tables


def test_a_new_table_is_sent_whole_with_the_last_token(rows: Rows) -> None:
    assert apply(rows, started=[start(2, [50, 60, 70], [7, 8, 9])]) == [2 + 2 * 3]
    assert table(rows, 2) == [7, 8, 9, *[NULL_BLOCK] * 3]
    assert rows.last_tokens.tolist() == [0, 0, 70, 0, 0]
    assert rows.token_ids == {2: [50, 60, 70]}


def test_a_table_that_grew_sends_its_new_cells_only(rows: Rows) -> None:
    apply(rows, started=[start(1, [5], [7, 8])])
    assert apply(rows, tables=[Entries(1, 0, 2, [9, 4])]) == [4]
    assert apply(rows, tables=[Entries(1, 0, 4, [5])]) == [2]
    assert table(rows, 1) == [7, 8, 9, 4, 5, NULL_BLOCK]


def test_an_entry_that_is_replaced_is_sent_alone(rows: Rows) -> None:
    apply(rows, started=[start(1, [5], [7, 8, 9])])
    assert apply(rows, tables=[Entries(1, 0, 1, [3])]) == [2]
    assert table(rows, 1)[:3] == [7, 3, 9]


def test_a_steady_decode_step_sends_nothing(rows: Rows) -> None:
    apply(rows, started=[start(1, [5], [7, 8])])
    assert apply(rows, decodes=decodes((1, 0))) == []
    assert apply(rows, chunks=[Chunk(1, 0, 1, (1,))]) == []
    assert apply(rows, ended=[3]) == []
    assert table(rows, 1)[:2] == [7, 8]


@pytest.mark.parametrize("other", [[7, 8], [1], [5, 6, 3, 2]], ids=str)
def test_a_row_that_begins_anew_is_sent_whole(rows: Rows, other: list[int]) -> None:
    """Also if it looks the same: nothing is compared."""
    apply(rows, started=[start(1, [5], [7, 8])])
    rows.last_tokens[1] = 99  # sampled meanwhile
    assert apply(rows, started=[start(1, [5, 6], other)]) == [2 + 2 * len(other)]
    assert table(rows, 1)[: len(other)] == other
    assert rows.last_tokens[1] == 6
    apply(rows, tables=[Entries(1, 0, len(other), [9])])
    assert table(rows, 1)[: len(other) + 1] == [*other, 9]


def test_all_changes_of_a_plan_are_sent_in_one_piece(rows: Rows) -> None:
    apply(rows, started=[start(0, [5], [1]), start(1, [6], [2, 3])])
    sent = apply(
        rows,
        started=[start(2, [7], [4]), start(3, [8], [5])],
        tables=[Entries(0, 0, 1, [6]), Entries(1, 0, 2, [7]), Entries(1, 0, 0, [8])],
    )
    assert sent == [2 * 2 + 2 * 5]
    assert [table(rows, row)[:3] for row in range(4)] == [[1, 6, 0], [8, 3, 7], [4, 0, 0], [5, 0, 0]]


def test_later_changes_of_a_plan_win(rows: Rows) -> None:
    """A fork may be started with a shared block that is copied in the same plan."""
    apply(rows, started=[start(0, [5], [1, 2])], tables=[Entries(0, 0, 2, [3]), Entries(0, 0, 1, [4])])
    assert table(rows, 0) == [1, 4, 3, 0, 0, 0]


def test_rows_that_begin_together_may_be_in_any_order(rows: Rows) -> None:
    apply(rows, started=[start(3, [5], [1, 2]), start(0, [6], [3, 4, 5]), start(2, [7], [])])
    assert [table(rows, row)[:3] for row in (0, 2, 3)] == [[3, 4, 5], [0, 0, 0], [1, 2, 0]]
    assert rows.last_tokens.tolist() == [6, 0, 7, 5, 0]


def test_each_group_has_a_table_of_its_own() -> None:
    rows = Rows(NUM_ROWS, 2, 5, CpuStream())
    assert rows.tables.shape == (2, NUM_ROWS + 1, 5)
    rows.apply(StepPlan(started=[Started(1, [5], ([1, 2], [3, 4, 5]), sampling())]))
    rows.apply(StepPlan(tables=[Entries(1, 1, 3, [6]), Entries(1, 0, 1, [9]), Entries(1, 1, 0, [NULL_BLOCK])]))
    assert [place[1].tolist() for place in rows.tables] == [[1, 9, 0, 0, 0], [0, 4, 5, 6, 0]]
    assert not any(place[[0, 2, 3, 4]].any() for place in rows.tables)


# ---- what the host keeps


def test_tokens_are_kept_until_a_row_ends_or_begins_anew(rows: Rows) -> None:
    apply(rows, started=[start(0, [5, 6], [1]), start(1, [7], [2])])
    apply(rows, ended=[0])
    assert rows.token_ids == {1: [7]}
    apply(rows, ended=[0, 1], started=[start(1, [8, 9], [3])])
    assert rows.token_ids == {1: [8, 9]}, "another sequence has got the row"


def test_log_probabilities_of_the_prompt_are_wanted_until_a_row_ends_or_begins_anew(rows: Rows) -> None:
    apply(rows, started=[start(0, [5, 6], [1], prompt_logprobs=3), start(1, [5, 6], [2], prompt_logprobs=0)])
    apply(rows, started=[start(2, [5, 6], [3])])
    assert rows.prompt_logprobs == {0: 3, 1: 0}
    apply(rows, ended=[0], started=[start(1, [5, 6], [2])])
    assert rows.prompt_logprobs == {}


def test_a_row_that_was_never_started_may_end(rows: Rows) -> None:
    """Its start was in a plan that raised."""
    assert apply(rows, ended=[0, 3]) == []
    assert rows.token_ids == {}


def test_dtypes_are_those_that_kernels_take(rows: Rows) -> None:
    assert (rows.tables[0].dtype, rows.last_tokens.dtype) == (torch.int32, torch.int64)


def test_the_padding_row_is_the_last_one(rows: Rows) -> None:
    assert rows.padding_row == NUM_ROWS == len(rows.last_tokens) - 1 == len(rows.tables[0]) - 1
    assert rows.last_tokens.tolist() == [0] * (NUM_ROWS + 1)
    assert rows.tables[0].tolist() == [[NULL_BLOCK] * WIDTH] * (NUM_ROWS + 1)


# ---- any plans


@FAST
@given(
    rng=st.randoms(use_true_random=True),
    num_groups=st.integers(1, 3),
    num_plans=st.integers(1, 25),
    params=st.sampled_from([{}, {"prompt_logprobs": 2}]),
)
def test_what_the_device_keeps_is_what_the_plans_say(
    rng: random.Random, num_groups: int, num_plans: int, params: dict[str, object]
) -> None:
    """Over rows that begin, begin anew, grow, fork, share blocks and part with them, end, and are another sequence's."""
    plans = RandomPlans(
        rng,
        num_rows=NUM_ROWS,
        num_blocks=NUM_ROWS * 12 * num_groups,
        block_size=4,
        max_len=40,
        continuation=lambda prompt, seed: [(prompt[0] + seed + 7 * i) % 300 for i in range(40)],
        num_groups=num_groups,
        params=params,
    )
    rows = Rows(NUM_ROWS, num_groups, 10, FakeStream())
    for _ in range(num_plans):
        before = [place.clone() for place in (rows.last_tokens, *rows.tables)]
        plan = plans.next()
        rows.apply(plan)
        for row, seq in plans.seqs.items():
            for group, blocks in enumerate(seq.tables):
                assert rows.tables[group][row, : len(blocks)].tolist() == blocks
        for begun in plan.started:
            assert rows.last_tokens[begun.row] == begun.token_ids[-1]
            assert rows.token_ids[begun.row] == begun.token_ids
            assert rows.prompt_logprobs.get(begun.row) == begun.sampling.prompt_logprobs
        fresh = {begun.row for begun in plan.started}
        changed = fresh | {entries.row for entries in plan.tables}
        for place, old, touched in zip(
            (rows.last_tokens, *rows.tables), before, (fresh, *[changed] * num_groups), strict=True
        ):
            others = [row for row in range(NUM_ROWS + 1) if row not in touched]
            assert torch.equal(place[others], old[others])
        assert rows.token_ids.keys() == plans.seqs.keys()
        assert rows.prompt_logprobs.keys() <= plans.seqs.keys()
    assert not any(place[rows.padding_row].any() for place in (rows.last_tokens, *rows.tables))
