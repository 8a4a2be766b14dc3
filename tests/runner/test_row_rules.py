"""Pieces of rows: which samples they bind, and that they are sent only when something has changed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from nanoengine.runner.row_rules import ROWS_AT_ONCE, RowPieces, row_slices
from nanoengine.runner.stream import send_array
from tests.runner.fake_stream import FakeStream
from tests.runner.sampled_rows import CountingStream


def pack(numbers: np.ndarray, pieces: list[int]) -> Sequence[np.ndarray]:
    return numbers, np.array(pieces, dtype=np.int64)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_pieces_are_found_by_row_and_position() -> None:
    pieces = RowPieces[int](6, FakeStream(), pack)
    assert pieces.find(ints(3, 1), ints(0, 0)).tolist() == []
    pieces.put(1, 10)
    pieces.put(4, 40, until=7)
    assert pieces.find(ints(3, 1, 4, 0), ints(9, 10**6, 6, 0)).tolist() == [1, 2]
    assert pieces.find(ints(3, 1, 4, 0), ints(9, 10**6, 7, 0)).tolist() == [1]
    pieces.drop(1)
    pieces.drop(2)  # has none
    assert pieces.find(ints(3, 1, 4, 0), ints(0, 0, 0, 0)).tolist() == [2]
    assert 4 in pieces
    assert 1 not in pieces
    assert pieces[4] == 40


def test_what_is_sent_is_what_a_fresh_pack_would_be() -> None:
    rng, stream = random.Random(0), CountingStream()
    pieces, known = RowPieces[int](9, stream, pack), dict[int, int]()
    for _ in range(300):
        row = rng.randrange(9)
        if rng.random() < 0.3:
            known[row] = rng.randrange(100)
            pieces.put(row, known[row])
        elif rng.random() < 0.2:
            known.pop(row, None)
            pieces.drop(row)
        rows = ints(*rng.sample(range(9), rng.randint(1, 9)))
        numbers = pieces.find(rows, np.zeros_like(rows))
        assert numbers.tolist() == [number for number, row in enumerate(rows.tolist()) if row in known]
        if len(numbers):
            sent = pieces.send(numbers, rows)
            assert [tensor.tolist() for tensor in sent] == [
                numbers.tolist(),
                [known[row] for row in rows[numbers].tolist()],
            ]


def test_a_steady_step_sends_nothing() -> None:
    stream = CountingStream()
    pieces = RowPieces[int](6, stream, pack)
    pieces.put(2, 5)
    rows = ints(0, 2, 1)
    first = pieces.send(np.array([1]), rows)
    assert stream.num_sent == 2
    assert pieces.send(np.array([1]), rows) is first
    pieces.put(3, 7)
    pieces.drop(3)
    assert pieces.send(np.array([1]), ints(5, 2, 4))[1].tolist() == [5]
    assert stream.num_sent == 4


def test_arrays_of_any_shape_are_sent() -> None:
    for array in (
        np.arange(12).reshape(3, 4),
        np.zeros((0, 5), np.float32),
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
    ):
        sent = send_array(array, FakeStream())
        assert sent.shape == array.shape
        assert sent.tolist() == array.tolist()


@pytest.mark.parametrize("count", [0, 1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 3 * ROWS_AT_ONCE])
def test_slices_cover_all_rows_a_bounded_number_at_a_time(count: int) -> None:
    parts = [range(count)[part] for part in row_slices(count)]
    assert [row for part in parts for row in part] == list(range(count))
    assert all(0 < len(part) <= ROWS_AT_ONCE for part in parts)
