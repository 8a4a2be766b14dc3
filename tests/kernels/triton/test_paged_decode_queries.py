"""Decoding the last few tokens of each sequence at once, each of them against the formula in float64."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux on x86-64 alone")

from nanoengine.kernels.triton import paged_decode as module
from nanoengine.kernels.triton.paged_decode import MOST_ROWS, ROWS, paged_decode
from nanoengine.kernels.triton.tuning import Tuning
from tests.kernels.triton.test_paged_decode import (
    CUT,
    DEVICE,
    PLAIN,
    SCALE,
    UNCUT,
    Asked,
    Case,
    all_dtypes,
    assert_near,
    drawn_features,
    every_feature,
)

whole_or_in_parts = pytest.mark.parametrize("tuning", [UNCUT, CUT], ids=["whole", "in parts"])


def decode(
    case: Case, counts: Sequence[int], q: Tensor, tuning: Tuning = UNCUT, more: int = 0, starts: Tensor | None = None
) -> Tensor:
    """The last counts[i] tokens of every sequence i, on a device that one program fills."""
    if starts is None:
        starts = case.int32([sum(counts[:i]) for i in range(len(counts) + 1)])
    sequences = case.tables_from([n - count for n, count in zip(case.lens, counts, strict=True)]), case.int32(case.lens)
    queries: dict[str, Any] = {"query_start_loc": starts, "max_query_len": max(counts) + more}
    out = paged_decode(q, *case.caches, *sequences, SCALE, case.workspace, tuning, 1, **queries, **case.options)
    assert not case.workspace.counters(1, DEVICE).any()
    return out


def exact(case: Case, counts: Sequence[int], q: Tensor) -> Tensor:
    """Every token alone."""
    places = [
        (i, n - count + j) for i, (n, count) in enumerate(zip(case.lens, counts, strict=True)) for j in range(count)
    ]
    return torch.stack([case.exact(i, q[row], position) for row, (i, position) in enumerate(places)])


def check(case: Case, counts: Sequence[int], tuning: Tuning = UNCUT, more: int = 0) -> None:
    q = case.queries(sum(counts))
    assert_near(decode(case, counts, q, tuning, more), exact(case, counts, q))


@all_dtypes
@whole_or_in_parts
def test_sequences_that_have_several_tokens_each_one_or_none(tuning: Tuning, dtype: torch.dtype) -> None:
    lens, counts = [3, 17, 0, 16, 64, 131, 90, 300], [3, 1, 0, 4, 2, 4, 0, 3]
    check(Case(lens, 1, 2, dtype=dtype), counts, tuning)


@pytest.mark.parametrize(("group", "longest"), [(1, 2), (3, 5), (4, 17), (8, 5), (20, 3)])
def test_tokens_and_heads_that_fill_tiles_and_those_that_do_not(group: int, longest: int) -> None:
    """Also as many tokens as several programs share, where some sequences have none for the later ones."""
    check(Case([18, 40, 300], 2, group), [longest, 1, longest - 1], CUT)


@every_feature
@whole_or_in_parts
def test_every_token_sees_its_own_window(tuning: Tuning, asked: Asked) -> None:
    """Runs begin, end and lie around what is seen: an end of a tile that only the later ones see."""
    lens, counts = [4, 41, 83, 163, 258, 300], [4, 3, 6, 5, 3, 1]
    check(Case(lens, 1, 2, asked=asked), counts, tuning)


def test_together_they_see_more_than_each_and_in_more_parts() -> None:
    """A part is as long as what each sees."""
    check(Case([300, 259], 1, 2, asked=Asked(window=8 * ROWS)), [4, 5], CUT)


@settings(max_examples=25, deadline=None, database=None)
@given(
    runs=st.lists(st.tuples(st.integers(0, 17), st.integers(0, 300)), min_size=1, max_size=4),
    num_kv_heads=st.integers(1, 2),
    group=st.integers(1, 9),
    block_size=st.sampled_from([16, 32, 128]),
    more=st.integers(0, 9),
    tuning=st.sampled_from([UNCUT, CUT, replace(UNCUT, decode_programs_per_sm=30)]),
    asked=drawn_features,
    seed=st.integers(0, 99),
)
def test_any_batch(
    runs: list[tuple[int, int]],
    num_kv_heads: int,
    group: int,
    block_size: int,
    more: int,
    tuning: Tuning,
    asked: Asked,
    seed: int,
) -> None:
    """Also one that is no longer than it might be, as a recorded step is."""
    counts = [count for count, _ in runs]
    case = Case(
        [count + before for count, before in runs], num_kv_heads, group, block_size=block_size, asked=asked, seed=seed
    )
    if not any(counts):
        counts[0] = min(1, case.lens[0])
    if any(counts):
        check(case, counts, tuning, more)


@pytest.mark.parametrize("sink", [-math.inf, -1e4, 1e4])
@whole_or_in_parts
def test_sinks_take_their_weight_once_and_whatever_they_are(tuning: Tuning, sink: float) -> None:
    """Even of tokens that see nothing in the first part, or nothing in the last."""
    case = Case([5, 260], 1, 4, asked=Asked(window=30, sinks=True))
    case.sinks = torch.full((4,), sink, device=DEVICE)
    check(case, [5, 20], tuning)


@whole_or_in_parts
def test_a_token_of_nan_spoils_no_other(tuning: Tuning) -> None:
    """Its query, that is, and its key: its value is multiplied by 0."""
    case = Case([70, 200])
    q = case.queries(7)
    before = decode(case, [3, 4], q, tuning)
    q[5] = torch.nan
    block = int(case.tables[1, 199 // 16])
    case.caches[0][block, 199 % 16] = torch.nan
    out = decode(case, [3, 4], q, tuning)
    assert out[5:].isnan().all()
    assert torch.equal(out[:5], before[:5])


@whole_or_in_parts
def test_a_sequence_decodes_the_same_alone_and_in_a_batch(tuning: Tuning) -> None:
    case = Case([150, 3, 0, 64])
    counts = [4, 2, 0, 1]
    q, lens, tables = case.queries(7), case.lens, case.tables
    together, first = decode(case, counts, q, tuning), 0
    for i, count in enumerate(counts):
        case.lens, case.tables = [lens[i]], tables[i : i + 1]
        rows = slice(first, first + count)
        assert torch.equal(decode(case, [count], q[rows], tuning, more=4 - count), together[rows])
        first += count


@whole_or_in_parts
def test_padding_with_more_tokens_than_there_may_be_changes_nothing(tuning: Tuning) -> None:
    """All that is left of a recorded step is a run of its own, of length 0. Its blocks are nobody's."""
    case = Case([150, 40], asked=Asked(window=100))
    counts, padding = [4, 3], 90
    q = case.queries(sum(counts) + padding)
    alone = decode(case, counts, q[:7], tuning)
    case.lens, case.tables = [150, 40, 0, 0], torch.cat([case.tables, torch.full_like(case.tables, 1 << 30)])
    padded = [*counts, padding, 0]
    out = decode(case, padded, q, tuning, more=4 - padding)
    assert out.shape == q.shape
    assert torch.equal(out[:7], alone)


def test_a_launch_depends_on_bounds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **options: launches.append((grid, options))

    monkeypatch.setattr(module, "_decode_kernel", Kernel())
    for lens, counts in (([150, 40], [4, 1]), ([9, 3], [1, 1])):
        case = Case(lens, asked=Asked(window=100))
        case.tables = torch.zeros(2, 20, dtype=torch.int32, device=DEVICE)
        decode(case, counts, case.queries(5), CUT, more=5 - max(counts))
    assert launches[0] == launches[1]


@pytest.mark.parametrize(
    ("group", "longest", "rows", "queries", "lots"),
    [
        (1, 3, 16, 16, 1),
        (2, 1, 16, 1, 1),
        (2, 2, 16, 8, 1),
        (2, 8, 16, 8, 1),
        (2, 9, 32, 16, 1),
        (2, 17, 32, 32, 2),
        (5, 3, 32, 4, 1),
        (8, 8, 32, 8, 2),
        (20, 3, 32, 4, 4),
    ],
)
def test_tiles_are_filled_and_no_larger_than_they_must(
    monkeypatch: pytest.MonkeyPatch, group: int, longest: int, rows: int, queries: int, lots: int
) -> None:
    """A few kernels do for all lengths."""
    found: dict[str, Any] = {}

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **options: found.update(options, grid=grid)

    monkeypatch.setattr(module, "_decode_kernel", Kernel())
    case = Case([40], 3, group)
    decode(case, [longest], case.queries(longest))
    assert (found["ROWS"], found["QUERIES"], found["grid"][0]) == (rows, queries, 3 * lots)
    assert ROWS <= rows <= MOST_ROWS


def test_one_token_at_most_is_not_taken_for_one_each() -> None:
    case = Case([70, 0, 130, 0])
    check(case, [1, 0, 1, 0])


def test_one_token_each_is_what_it_is_without_saying_so() -> None:
    """And the starts of sequences are not read."""
    case = Case([70, 3, 130], asked=PLAIN)
    q = case.queries(3)
    anything = case.int32([7, -1, 1 << 30, 5])
    assert torch.equal(decode(case, [1, 1, 1], q, CUT, starts=anything), decode(case, [1, 1, 1], q, CUT))
    assert_near(decode(case, [1, 1, 1], q, CUT), case.all_exact(q))
