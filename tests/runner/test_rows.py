"""Rows: only what has changed is sent, and what the device keeps is what the batches say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoengine import SamplingParams
from nanoengine.engine.kv.block_pool import NULL_BLOCK
from nanoengine.engine.messages import Phase, SamplingRow, ScheduledBatch
from nanoengine.engine.randomness import MASK, sequence_seed
from nanoengine.runner.rows import Changes, Rows
from nanoengine.runner.stream import CpuStream
from tests.engine.toys import FAST
from tests.runner.fake_stream import FakeStream

NUM_ROWS, WIDTH = 4, 6


def sampling(seed: int = 1, **params: float) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, ())  # type: ignore[arg-type]


def batch_of(tables: dict[int, list[int]], samples: dict[int, SamplingRow] | None = None) -> ScheduledBatch:
    """A batch as far as rows are concerned: {row: block table} and {row: how it is sampled}."""
    samples = samples or {}
    return ScheduledBatch(
        Phase.DECODE,
        rows=list(tables),
        block_tables=list(tables.values()),
        sampled_into=list(samples),
        sampling=list(samples.values()),
    )


@pytest.fixture
def rows() -> Rows:
    return Rows(NUM_ROWS, WIDTH, CpuStream())


def sent_cells(changes: Changes) -> dict[tuple[int, int], int]:
    """{(row, column): block} that is on its way."""
    if changes.cells is None or changes.blocks is None:
        assert changes.cells is changes.blocks is None
        return {}
    assert changes.cells.dtype == torch.int64
    assert changes.blocks.dtype == torch.int32
    places = [divmod(cell, WIDTH) for cell in changes.cells.tolist()]
    assert len(set(places)) == len(places)
    return dict(zip(places, changes.blocks.tolist(), strict=True))


def sent_rows(changes: Changes) -> list[int]:
    """Rows whose way of sampling is on its way."""
    if changes.rows is None or changes.floats is None or changes.integers is None:
        assert changes.rows is changes.floats is changes.integers is None
        return []
    assert (len(changes.floats), len(changes.integers)) == (3 * len(changes.rows), 2 * len(changes.rows))
    return changes.rows.tolist()


def send(rows: Rows, tables: dict[int, list[int]], samples: dict[int, SamplingRow] | None = None) -> Changes:
    changes = rows.find_changes(batch_of(tables, samples))
    rows.apply(changes)
    return changes


# ---- block tables


def test_a_new_table_is_sent_whole(rows: Rows) -> None:
    assert sent_cells(send(rows, {2: [7, 8, 9]})) == {(2, 0): 7, (2, 1): 8, (2, 2): 9}
    assert rows.tables[2].tolist() == [7, 8, 9, *[NULL_BLOCK] * 3]


def test_a_table_that_grew_sends_its_new_cells_only(rows: Rows) -> None:
    table = [7, 8]
    send(rows, {1: table})
    table += [9, 4]
    assert sent_cells(send(rows, {1: table})) == {(1, 2): 9, (1, 3): 4}
    table.append(5)
    assert sent_cells(send(rows, {1: table})) == {(1, 4): 5}
    assert rows.tables[1].tolist() == [7, 8, 9, 4, 5, NULL_BLOCK]


def test_an_unchanged_table_sends_nothing(rows: Rows) -> None:
    table = [7, 8]
    send(rows, {1: table})
    assert send(rows, {1: table}) == Changes(None, None, None, None, None)
    send(rows, {0: [3]})  # nor does another step in between
    assert sent_cells(send(rows, {1: table})) == {}


@pytest.mark.parametrize("other", [[7, 8], [1], [5, 6, 3, 2]], ids=str)
def test_another_list_is_sent_whole(rows: Rows, other: list[int]) -> None:
    """Also if it looks the same: it may have been another sequence's, or have changed before it was the same again."""
    send(rows, {1: [7, 8]})
    assert sent_cells(send(rows, {1: other})) == {(1, i): block for i, block in enumerate(other)}
    assert rows.tables[1, : len(other)].tolist() == other
    other.append(9)
    assert sent_cells(send(rows, {1: other})) == {(1, len(other) - 1): 9}


def test_tables_may_come_and_go_between_rows(rows: Rows) -> None:
    first, second = [1, 2], [3, 4, 5]
    send(rows, {0: first, 1: second})
    assert len(sent_cells(send(rows, {1: first, 0: second}))) == 5
    assert rows.tables[:2, :3].tolist() == [[3, 4, 5], [1, 2, 5]]


def test_changes_are_those_of_when_they_were_found() -> None:
    """The scheduler goes on while they are on their way."""
    stream = FakeStream()
    rows, table = Rows(NUM_ROWS, WIDTH, stream), [7]
    first = rows.find_changes(batch_of({0: table}))
    table.append(8)
    second = rows.find_changes(batch_of({0: table}))
    table.append(9)
    rows.apply(first)
    assert rows.tables[0].tolist() == [7, 0, 0, 0, 0, 0]
    rows.apply(second)
    assert rows.tables[0].tolist() == [7, 8, 0, 0, 0, 0]
    assert sent_cells(rows.find_changes(batch_of({0: table}))) == {(0, 2): 9}


# ---- sampling


def test_a_row_is_sampled_as_was_said(rows: Rows) -> None:
    how = sampling(seed=5, temperature=0.7, top_k=20, top_p=0.9, min_p=0.1)
    assert sent_rows(send(rows, {}, {3: how})) == [3]
    table = rows.sampling
    assert (table.temperature[3], table.top_p[3], table.min_p[3]) == pytest.approx((0.7, 0.9, 0.1))
    assert (table.top_k[3], table.seeds[3]) == (20, 5)


def test_sampling_is_sent_when_it_is_another_object(rows: Rows) -> None:
    how = sampling(top_k=4)
    assert sent_rows(send(rows, {0: [1]}, {0: how})) == [0]
    assert sent_rows(send(rows, {0: [1]}, {0: how})) == []
    assert sent_rows(send(rows, {0: [1]}, {0: sampling(top_k=4)})) == [0]
    assert sent_rows(send(rows, {0: [1]}, {1: how})) == [1]
    assert sent_rows(send(rows, {0: [1]}, {0: sampling(top_k=9), 1: how, 2: how})) == [0, 2]
    assert rows.sampling.top_k.tolist() == [9, 4, 4, 0, 0]


def test_a_top_k_below_0_is_none(rows: Rows) -> None:
    send(rows, {}, {0: sampling(top_k=-1), 1: sampling(top_k=0)})
    assert rows.sampling.top_k[:2].tolist() == [0, 0]


def test_seeds_keep_all_their_bits(rows: Rows) -> None:
    seeds = [0, 1 << 63, MASK, sequence_seed(3, 0)]
    send(rows, {}, {row: sampling(seed=seed) for row, seed in enumerate(seeds)})
    assert [seed & MASK for seed in rows.sampling.seeds[:NUM_ROWS].tolist()] == seeds


def test_dtypes_are_those_that_kernels_take(rows: Rows) -> None:
    table = rows.sampling
    assert {table.temperature.dtype, table.top_p.dtype, table.min_p.dtype} == {torch.float32}
    assert (table.top_k.dtype, table.seeds.dtype) == (torch.int32, torch.int64)
    assert (rows.tables.dtype, rows.newest.dtype) == (torch.int32, torch.int64)


def test_nobodys_row_is_the_last_one_and_greedy(rows: Rows) -> None:
    assert rows.nobody == NUM_ROWS == len(rows.newest) - 1 == len(rows.tables) - 1
    for table in (rows.sampling.temperature, rows.sampling.top_k, rows.sampling.seeds, rows.newest):
        assert table.tolist() == [0] * (NUM_ROWS + 1)
    assert rows.tables.tolist() == [[NULL_BLOCK] * WIDTH] * (NUM_ROWS + 1)
    assert rows.width == WIDTH


# ---- any batches

BLOCKS = st.lists(st.integers(1, 1000), min_size=1, max_size=WIDTH)
SAMPLING = st.builds(
    sampling,
    seed=st.integers(0, MASK),
    temperature=st.sampled_from([0.0, 0.5, 2.0]),
    top_k=st.sampled_from([-1, 0, 7]),
    top_p=st.sampled_from([1.0, 0.25]),
    min_p=st.sampled_from([0.0, 0.125]),
)


class Running:
    """A sequence as the scheduler moves it on: its table grows in place, or is another list after a preemption."""

    def __init__(self, data: st.DataObject):
        self.data = data
        self.table = data.draw(BLOCKS)
        self.how = data.draw(SAMPLING)

    def move_on(self) -> None:
        match self.data.draw(st.sampled_from(["stay", "grow", "preempted", "other sampling"])):
            case "grow" if len(self.table) < WIDTH:
                self.table.append(self.data.draw(st.integers(1, 1000)))
            case "preempted":
                self.table = self.data.draw(BLOCKS)
            case "other sampling":
                self.how = self.data.draw(SAMPLING)


@FAST
@given(st.data())
def test_what_the_device_keeps_is_what_the_batches_say(data: st.DataObject) -> None:
    rows = Rows(NUM_ROWS, WIDTH, FakeStream())
    running: dict[int, Running] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        chosen = data.draw(st.lists(st.sampled_from(range(NUM_ROWS)), min_size=1, unique=True))
        for row in chosen:
            if row in running and data.draw(st.integers(0, 3)):
                running[row].move_on()
            else:  # another sequence has got the row
                running[row] = Running(data)
        samples = data.draw(st.lists(st.sampled_from(chosen), unique=True))
        before = rows.tables.clone()
        send(rows, {row: running[row].table for row in chosen}, {row: running[row].how for row in samples})
        for row in chosen:
            table = running[row].table
            assert rows.tables[row, : len(table)].tolist() == table
        others = [row for row in range(NUM_ROWS + 1) if row not in chosen]
        assert torch.equal(rows.tables[others], before[others])
        for row in samples:
            how, table = running[row].how, rows.sampling
            params = how.params
            assert table.temperature[row] == params.temperature
            assert table.top_k[row] == max(params.top_k, 0)
            assert (table.top_p[row], table.min_p[row]) == (params.top_p, params.min_p)
            assert int(table.seeds[row]) & MASK == how.seed
    assert rows.tables[rows.nobody].tolist() == [NULL_BLOCK] * WIDTH
    assert rows.sampling.temperature[rows.nobody] == 0
    assert not rows.newest.any()
