"""Splits of decode attention: they are equal, hold all tokens once, and say the same as attention by its definition."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.core.attention import AttentionMetadata, AttentionSpec
from nanoengine.kernels.triton.attention import equal_splits
from nanoengine.kernels.triton.attention import paged_decode as module
from nanoengine.kernels.triton.attention.backend import TritonAttention
from nanoengine.kernels.triton.attention.equal_splits import STEP, plan_splits
from nanoengine.kernels.triton.tuning import DEFAULTS
from tests.kernels.attention.every_backend import DEVICE, written_in_torch
from tests.kernels.attention.paged import PLAIN, Heads, Pool, Sequences, assert_attended
from tests.kernels.noting import noting

ONE = replace(DEFAULTS, decode_programs_per_sm=1)
SCALED = replace(PLAIN, scale=0.3)
FULL = AttentionSpec(0.3, window=100, sinks=True, soft_cap=9.0)

LENS = [1, 0, 64, 65, 200, 128, 63, 0]
"""All around the ends of units; together 12 of these."""

ONE_EACH = [1] * len(LENS)
SEVERAL = [1, 0, 9, 2, 8, 1, 5, 30]
"""New tokens of each sequence, at most 9; the last is padding, which may have more."""


@pytest.fixture(autouse=True)
def everything_is_on_the_device() -> Iterator[None]:
    with DEVICE:
        yield


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many splits there are of what all KV heads have together."""
    count = [1]
    monkeypatch.setattr(module, "num_multiprocessors", lambda *_: count[0])
    return count


# ---- plans


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


# ---- what attention says


def step_of(
    heads: Heads, spec: AttentionSpec, counts: list[int] = ONE_EACH, *, quantized: bool = False
) -> tuple[Pool, Tensor, AttentionMetadata]:
    """The last tokens of sequences whose tokens are all in the cache; those of padding, too."""
    backend, count = written_in_torch(TritonAttention(16, ONE)), len(LENS)
    sequences = Sequences(heads, 16, LENS)
    pool = Pool(sequences, backend, norms=False, rotated=False, spec=spec, quantized=quantized)
    pool.fill(LENS)
    metadata = replace(
        pool.metadata(count, range(count), starts_of(counts), LENS),
        query_start_loc=torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32),
        query_lens_list=[min(own, 9) for own in counts],
    )
    nothing = torch.zeros_like(pool.sequences.qkv[0][:1])
    qkv = [
        own[n - new :] if n else nothing.expand(new, -1)
        for own, n, new in zip(sequences.qkv, LENS, counts, strict=True)
    ]
    return pool, torch.cat(qkv).unflatten(1, (-1, heads.dim))[:, : heads.num * heads.group], metadata


def starts_of(counts: list[int]) -> list[int]:
    return [max(0, n - new) for n, new in zip(LENS, counts, strict=True)]


@pytest.mark.parametrize(
    ("heads", "spec", "counts", "quantized"),
    [
        (Heads(1, 3, 16), SCALED, ONE_EACH, False),
        (Heads(1, 3, 16), FULL, ONE_EACH, False),
        (Heads(1, 3, 16), replace(FULL, chunked=True), ONE_EACH, False),
        (Heads(1, 20, 16), FULL, ONE_EACH, False),
        (Heads(1, 1, 16), SCALED, SEVERAL, False),
        (Heads(1, 3, 16), replace(FULL, chunked=True), SEVERAL, False),
        (Heads(1, 3, 16), FULL, SEVERAL, True),
        (Heads(1, 20, 16), replace(FULL, window=5), SEVERAL, False),
    ],
    ids=["plain", "full", "chunked", "two lots", "drafts", "drafts, chunked", "drafts, int8", "drafts, ten lots"],
)
def test_shares_that_end_anywhere_say_the_same(
    heads: Heads,
    spec: AttentionSpec,
    counts: list[int],
    quantized: bool,
    splits: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From one program that reads all to more than there is work for, and again in the same workspace. Memory held NaN before."""
    pool, q, metadata = step_of(heads, spec, counts, quantized=quantized)
    exact, empty = pool.exact(starts_of(counts), LENS), torch.empty
    there = torch.tensor(LENS).repeat_interleave(torch.tensor(counts)) > 0

    def full(*shape: int, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        return made.fill_(torch.nan if made.dtype.is_floating_point else -(1 << 30))

    monkeypatch.setattr(torch, "empty", full)
    lots = -(-heads.group // 16) if counts is ONE_EACH else 4
    for count in (1, 3, 7, 12, 13, 40):
        splits[0] = count * lots
        out = pool.backend.attend(q, pool.kv, metadata, spec, pool.sinks)
        assert_attended(out[there], exact)
        if counts is ONE_EACH:
            assert not out[~there].any(), "a padding row is zeros"
        assert isinstance(pool.backend, TritonAttention)
        assert not pool.backend._workspace.counters(1, DEVICE).any()
    again = pool.backend.attend(q, pool.kv, replace(metadata), spec, pool.sinks)
    assert torch.equal(again[there], out[there])


# ---- how it is launched


@pytest.mark.usefixtures("splits")
def test_layers_plan_once_for_each_window() -> None:
    """The launch behind the one that plans is none that may begin before it ends."""
    pool, q, metadata = step_of(Heads(1, 2, 16), SCALED)
    backend = TritonAttention(16, replace(ONE, dependent_launch=2))
    with noting() as launches:
        for window in (None, 100, None, 100):
            backend.attend(q, pool.kv, metadata, replace(SCALED, window=window))
    names = ["_plan_kernel", "_decode_kernel"] * 2 + ["_decode_kernel"] * 2
    assert [launch.name for launch in launches] == names
    assert [launch.values["LAUNCH"] for launch in launches] == [1, 0, 1, 0, 1, 1]
    assert [launch.options.get("launch_pdl", False) for launch in launches] == [True, False, True, False, True, True]
