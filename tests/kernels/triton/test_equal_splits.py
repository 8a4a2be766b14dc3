"""Splits of decode attention: they are equal, and hold all tokens once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.kernels.triton.attention import equal_splits
from nanoengine.kernels.triton.attention.equal_splits import STEP, plan_splits
from tests.kernels.attention.every_backend import DEVICE


@pytest.fixture(autouse=True)
def everything_is_on_the_device() -> Iterator[None]:
    with DEVICE:
        yield


@settings(max_examples=40, database=None)
@given(
    lens=st.lists(st.one_of(st.integers(0, 3 * STEP), st.integers(0, 1 << 14)), min_size=1, max_size=40),
    num_splits=st.one_of(st.integers(1, 20), st.integers(1, 140)),
    window=st.sampled_from([0, 0, 1, STEP, 1000, -STEP, -100]),
    queries=st.sampled_from([None, [1], [3, 0, 9, 1]]),
    seqs=st.sampled_from([16, 256]),
)
def test_shares_are_equal_and_hold_every_token_once(
    lens: list[int], num_splits: int, window: int, queries: list[int] | None, seqs: int
) -> None:
    """Those of several new tokens begin with what the first of these sees, and have longer units."""
    step, counts, starts_of = STEP, [1] * len(lens), None
    if queries is not None:
        step, counts = 2 * STEP, [queries[i % len(queries)] for i in range(len(lens))]
        starts_of = torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equal_splits, "SEQS", seqs)
        plan = plan_splits(torch.tensor(lens, dtype=torch.int32), num_splits, window, 0, starts_of, step).T.tolist()
    starts = [0] * len(lens)
    if window:
        position = [n - count for n, count in zip(lens, counts, strict=True)]
        starts = [max(0, i + 1 - window if window > 0 else i // -window * -window) for i in position]
    units = [
        (seq, start, n)
        for seq, (first, n) in enumerate(zip(starts, lens, strict=True))
        for start in range(first, max(n, first + 1), step)
    ]
    whose: dict[int, list[int]] = {}  # the splits that read something of a sequence
    begins = []
    for split in range(num_splits):
        begin, end = (bisect_left(units, tuple(plan[i][:2])) for i in (split, split + 1))
        assert end - begin in (len(units) // num_splits, -(-len(units) // num_splits))
        for seq, *_ in units[begin:end]:
            if whose.setdefault(seq, [split])[-1] != split:
                whose[seq].append(split)
        begins.append(begin)
    assert plan[0][:2] == list(units[0][:2])
    assert plan[-1][0] == len(lens)
    for split, (begin, found) in enumerate(zip([*begins, len(units)], plan, strict=True)):
        if begin < len(units):
            assert found[:3] == list(units[begin])
            assert found[3:] == [whose[units[begin][0]][0], len(whose[units[begin][0]])]
        else:
            assert (found[0], found[1], found[3]) == (len(lens), 0, split)
