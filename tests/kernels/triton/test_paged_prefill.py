"""Prefill over paged K/V against the formula in float64: every history, chunk and group, and nothing read that is not there."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux on x86-64 alone")

from nanoengine.kernels.triton.paged_prefill import paged_prefill
from tests.kernels.triton.test_paged_decode import (
    DEVICE,
    PLAIN,
    SCALE,
    Asked,
    Case,
    all_dtypes,
    assert_near,
    drawn_features,
    every_feature,
)


def prefill(
    case: Case, q: Tensor, starts: Sequence[int], ends: Sequence[int], scale: float = SCALE, more: int = 0
) -> Tensor:
    """Tokens starts[i] to ends[i] of every sequence i, whatever of it the cache has beyond them."""
    query_lens = [end - start for start, end in zip(starts, ends, strict=True)]
    query_start = case.int32([sum(query_lens[:i]) for i in range(len(query_lens) + 1)])
    longest = max(query_lens) + more
    sequences = case.tables_from(starts), query_start, case.int32(ends)
    return paged_prefill(q, *case.caches, *sequences, longest, scale, **case.options)


def check(case: Case, starts: Sequence[int], more: int = 0, scale: float = SCALE) -> None:
    """The tokens from starts[i] to the end of each sequence."""
    spans = list(zip(starts, case.lens, strict=True))
    q = case.queries(sum(end - start for start, end in spans))
    out = prefill(case, q, starts, case.lens, scale, more)
    seen = [(i, position) for i, span in enumerate(spans) for position in range(*span)]
    assert_near(out, torch.stack([case.exact(i, q[j], position, scale) for j, (i, position) in enumerate(seen)]))


@all_dtypes
def test_whole_sequences_of_lengths_around_tiles_and_blocks(dtype: torch.dtype) -> None:
    lens = [1, 15, 16, 17, 63, 64, 65, 130]
    check(Case(lens, 1, 2, dtype=dtype), [0] * len(lens))


@all_dtypes
def test_tokens_after_a_history(dtype: torch.dtype) -> None:
    lens = [2, 17, 64, 65, 100, 130, 200]
    check(Case(lens, 1, 2, dtype=dtype), [1, 16, 63, 1, 64, 70, 199])


@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
def test_blocks_smaller_and_larger_than_a_tile(block_size: int) -> None:
    lens = [1, block_size - 1, block_size, block_size + 1]
    check(Case(lens, 1, 1, 16, block_size=block_size), [0, 5, 0, block_size - 3])


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 20])
@all_dtypes
def test_groups_of_every_size(group: int, dtype: torch.dtype) -> None:
    check(Case([5, 40, 33], 2, group, 16, dtype=dtype), [0, 0, 20])


@all_dtypes
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_heads_of_every_size(head_dim: int, dtype: torch.dtype) -> None:
    check(Case([3, 70, 100], 1, 2, head_dim, dtype=dtype), [0, 0, 80])


@every_feature
@pytest.mark.parametrize("starts", [[0, 0, 0, 0], [16, 60, 39, 140]], ids=["whole", "after a history"])
def test_every_feature(starts: list[int], asked: Asked) -> None:
    check(Case([17, 66, 130, 230], 1, 2, asked=asked), starts)


@all_dtypes
def test_features_together(dtype: torch.dtype) -> None:
    check(Case([90, 210], 2, 3, dtype=dtype, asked=Asked(100, True, 3.0)), [0, 130])


@pytest.mark.parametrize("sink", [-math.inf, -1e4, 0.0, 1e4])
@pytest.mark.parametrize("window", [None, 5])
def test_sinks_take_their_weight_whatever_they_are(window: int | None, sink: float) -> None:
    case = Case([40], 1, 5, 16, asked=Asked(window, sinks=True))
    case.sinks = torch.full((5,), sink, device=DEVICE)
    check(case, [20])


@settings(max_examples=12, deadline=None, database=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 120), st.integers(0, 90)), min_size=1, max_size=3),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([16, 32]),
    block_size=st.sampled_from([16, 32, 128]),
    head_major=st.booleans(),
    half=st.booleans(),
    more=st.integers(0, 100),
    asked=drawn_features,
    seed=st.integers(0, 99),
)
def test_any_batch(
    spans: list[tuple[int, int]],
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    head_major: bool,
    half: bool,
    more: int,
    asked: Asked,
    seed: int,
) -> None:
    """Sequences without new tokens among them, and room for longer ones."""
    lens = [history + new for history, new in spans]
    dtype = torch.float16 if half else torch.float32
    layout = {"block_size": block_size, "head_major": head_major}
    case = Case([*lens, 1], num_kv_heads, group, head_dim, dtype=dtype, asked=asked, seed=seed, **layout)
    check(case, [*(history for history, _ in spans), 0], more)


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [(PLAIN, torch.float32), (PLAIN, torch.float16), (Asked(33), torch.float16)],
    ids=str,
)
def test_in_chunks_it_is_what_it_is_at_once(asked: Asked, dtype: torch.dtype) -> None:
    """Tokens after the chunk are in the cache already: none of them may be seen."""
    case = Case([150, 70], 1, 3, dtype=dtype, asked=asked)
    q = case.queries(220).split([150, 70])
    whole = prefill(case, torch.cat(q), [0, 0], [150, 70]).split([150, 70])
    for starts, ends in (([0, 0], [64, 1]), ([64, 1], [65, 50]), ([65, 50], [150, 70])):
        chunk = prefill(case, torch.cat([q[i][starts[i] : ends[i]] for i in range(2)]), starts, ends)
        expected = torch.cat([whole[i][starts[i] : ends[i]] for i in range(2)])
        torch.testing.assert_close(chunk, expected, rtol=0, atol=1e-5 if dtype is torch.float32 else 2e-3)


@pytest.mark.parametrize("asked", [PLAIN, Asked(70, True, 9.0)], ids=str)
def test_one_new_token_is_what_decoding_is(asked: Asked) -> None:
    case = Case([150, 1, 64], asked=asked)
    q = case.queries(3)
    out = prefill(case, q, [149, 0, 63], [150, 1, 64])
    torch.testing.assert_close(out, case.decode(q), rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 20.0])
@pytest.mark.parametrize("asked", [PLAIN, Asked(soft_cap=0.5), Asked(window=70, sinks=True)], ids=str)
def test_scores_that_are_equal_and_scores_far_apart(asked: Asked, scale: float) -> None:
    case = Case([150], 1, 2, asked=asked)
    q = case.queries(150)
    out = prefill(case, q, [0], [150], scale).cpu().double()
    exact = torch.stack([case.exact(0, q[i], i, scale) for i in range(150)])
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("asked", [PLAIN, Asked(50, True, 9.0)], ids=str)
def test_a_padding_row_is_zeros_and_changes_nothing(asked: Asked) -> None:
    """It has a token, which attention does not see."""
    case = Case([40, 0, 70], asked=asked)
    q = case.queries(111)
    starts, ends = case.int32([0, 40, 41, 111]), case.int32([40, 0, 70])
    out = paged_prefill(q, *case.caches, case.tables, starts, ends, 70, SCALE, **case.options)
    assert not out[40].any()
    others = [i for i in range(111) if i != 40]
    case.lens[1] = 0
    assert torch.equal(out[others], prefill(case, q[others], [0, 0, 0], [40, 0, 70]))


@pytest.mark.parametrize("asked", [PLAIN, Asked(10, True, 9.0)], ids=str)
def test_a_sequence_of_nan_shows_it_and_spoils_no_other(asked: Asked) -> None:
    case = Case([40, 33, 21], asked=asked)
    q = case.queries(94)
    q[40:73] = torch.nan
    pieces = prefill(case, q, [0, 0, 0], case.lens).split(case.lens)
    assert pieces[1].isnan().all()
    assert pieces[0].isfinite().all()
    assert pieces[2].isfinite().all()


def test_a_sequence_is_prefilled_the_same_alone_and_in_a_batch() -> None:
    case = Case([100, 3, 64])
    q = case.queries(167).split(case.lens)
    together = prefill(case, torch.cat(q), [0] * 3, case.lens).split(case.lens)
    for i, n in enumerate(case.lens):
        lens, starts = case.int32([n]), case.int32([0, n])
        alone = paged_prefill(q[i], *case.caches, case.tables[i : i + 1], starts, lens, n, SCALE)
        assert torch.equal(alone, together[i])


def test_queries_with_gaps_between_them() -> None:
    case = Case([20, 50])
    q = case.queries(70)
    exact = prefill(case, q, [0, 0], case.lens)
    projections = torch.zeros(70, 8, q.shape[2], device=DEVICE)
    projections[:, 2:6] = q
    ragged = torch.zeros(2 * q.numel() + 1, device=DEVICE)
    ragged[1::2] = q.flatten()
    for other in (projections[:, 2:6], ragged[1::2].view_as(q), q.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(prefill(case, other, [0, 0], case.lens), exact)


def test_no_tokens() -> None:
    case = Case([5])
    out = paged_prefill(case.queries(0), *case.caches, case.tables, case.int32([0, 0]), case.int32([5]), 0, SCALE)
    assert out.shape == (0, 4, 32)
