"""Decoding over paged K/V against the formula in float64: every length, group and cut, and nothing read that is not there."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux on x86-64 alone")

from nanoengine.kernels.triton import paged_decode as module
from nanoengine.kernels.triton.paged_cache import cache_strides
from nanoengine.kernels.triton.paged_decode import MAX_PARTS, STEP, count_parts, paged_decode

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE = 0.3
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""Largest error, relative to a value of size 1 or more. The interpreter cuts bfloat16 off where a GPU rounds it."""

all_dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float16", "bfloat16"])


class Case:
    """Random K and V of some sequences, at shuffled blocks of a cache that is NaN wherever no token was written.

    Args:
        head_major: whether the cache has heads before slots; K and V of another layer lie between them in any case.
    """

    def __init__(
        self,
        lens: Sequence[int],
        num_kv_heads: int = 2,
        group: int = 2,
        head_dim: int = 32,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        head_major: bool = True,
        seed: int = 0,
    ):
        self.generator = torch.Generator().manual_seed(seed)
        self.lens, self.num_heads, self.group, self.head_dim = list(lens), num_kv_heads * group, group, head_dim
        self.block_size, self.dtype = block_size, dtype
        self.k, self.v = ([self.random(n, num_kv_heads, head_dim) for n in lens] for _ in range(2))
        counts = [math.ceil(n / block_size) for n in lens]
        num_blocks = sum(counts) + 2
        blocks = list(range(1, num_blocks))
        random.Random(seed).shuffle(blocks)
        rows = (num_kv_heads, block_size) if head_major else (block_size, num_kv_heads)
        memory = torch.full((num_blocks, 2, 2, *rows, head_dim), torch.nan, dtype=dtype)
        caches = [memory[:, 1, i].transpose(1, 2) if head_major else memory[:, 1, i] for i in range(2)]
        self.tables = torch.zeros(len(counts), max([1, *counts]) + 1, dtype=torch.int32)
        for i, n in enumerate(lens):
            table = [blocks.pop() for _ in range(counts[i])]
            self.tables[i, : counts[i]] = torch.tensor(table, dtype=torch.int32)
            for position in range(n):
                for cache, values in zip(caches, (self.k[i], self.v[i]), strict=True):
                    cache[table[position // block_size], position % block_size] = values[position]
        memory = memory.to(DEVICE)
        self.caches = [memory[:, 1, i].transpose(1, 2) if head_major else memory[:, 1, i] for i in range(2)]
        self.tables = self.tables.to(DEVICE)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def queries(self, count: int) -> Tensor:
        return self.random(count, self.num_heads, self.head_dim).to(DEVICE)

    def exact(self, i: int, q: Tensor, position: int, scale: float = SCALE) -> Tensor:
        """The result of the query [num_heads, head_dim] at a position of sequence i, which sees all up to there."""
        k, v = (x[i][: position + 1].double().repeat_interleave(self.group, 1) for x in (self.k, self.v))
        weights = (torch.einsum("hd,thd->ht", q.cpu().double(), k) * scale).softmax(-1)
        return torch.einsum("ht,thd->hd", weights, v)

    def decode(self, q: Tensor, scale: float = SCALE, num_sms: int | None = None) -> Tensor:
        return paged_decode(q, *self.caches, self.tables, self.int32(self.lens), scale, num_sms)

    def check(self, num_sms: int | None = None, scale: float = SCALE) -> None:
        q = self.queries(len(self.lens))
        out = self.decode(q, scale, num_sms)
        zeros = torch.zeros(self.num_heads, self.head_dim, dtype=torch.float64)
        exact = [self.exact(i, q[i], n - 1, scale) if n else zeros for i, n in enumerate(self.lens)]
        assert_near(out, torch.stack(exact))

    @staticmethod
    def int32(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)


def assert_near(out: Tensor, exact: Tensor) -> None:
    assert out.shape == exact.shape
    error = (out.cpu().double() - exact) / exact.abs().clamp(min=1)
    assert error.abs().max() <= TOLERANCE[out.dtype]  # never true of NaN


def cut(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    monkeypatch.setattr(module, "count_parts", lambda *_: parts)


@all_dtypes
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_lengths_around_tiles_and_blocks_with_empty_sequences_among_them(
    monkeypatch: pytest.MonkeyPatch, parts: int, dtype: torch.dtype
) -> None:
    cut(monkeypatch, parts)
    Case([1, 15, 0, 16, 17, 31, 33, 63, 64, 65, 0, 129, 200], 1, 2, dtype=dtype).check()


@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
@pytest.mark.parametrize("parts", [1, 3])
def test_blocks_smaller_and_larger_than_a_tile(monkeypatch: pytest.MonkeyPatch, parts: int, block_size: int) -> None:
    cut(monkeypatch, parts)
    Case([1, block_size - 1, block_size, block_size + 1, 150], 1, 1, 16, block_size=block_size).check()


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 20])
@pytest.mark.parametrize("parts", [1, 2])
def test_groups_of_every_size(monkeypatch: pytest.MonkeyPatch, parts: int, group: int) -> None:
    cut(monkeypatch, parts)
    Case([5, 90], 2, group).check()


@all_dtypes
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_heads_of_every_size(monkeypatch: pytest.MonkeyPatch, head_dim: int, dtype: torch.dtype) -> None:
    for parts in (1, 3):
        cut(monkeypatch, parts)
        Case([3, 70, 130], 1, 2, head_dim, dtype=dtype).check()


def test_as_many_parts_as_there_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, MAX_PARTS)
    Case([900, 64, 0], 1, 1, 16, block_size=64).check()


@settings(max_examples=20, deadline=None, database=None)
@given(
    lens=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([16, 32, 64]),
    block_size=st.sampled_from([16, 32, 128]),
    head_major=st.booleans(),
    num_sms=st.sampled_from([1, 3, 20, 132]),
    seed=st.integers(0, 99),
)
def test_any_batch(
    lens: list[int],
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    head_major: bool,
    num_sms: int,
    seed: int,
) -> None:
    case = Case(lens, num_kv_heads, group, head_dim, block_size=block_size, head_major=head_major, seed=seed)
    case.check(num_sms)


@pytest.mark.parametrize("scale", [0.0, 20.0])
def test_scores_that_are_equal_and_scores_far_apart(scale: float) -> None:
    case = Case([40, 170], 1, 2)
    q = case.queries(2)
    exact = torch.stack([case.exact(i, q[i], n - 1, scale) for i, n in enumerate(case.lens)])
    torch.testing.assert_close(case.decode(q, scale).cpu().double(), exact, rtol=1e-4, atol=1e-4)


def test_parts_that_nobody_wrote_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in memory before: here NaN is."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan))
    cut(monkeypatch, 6)
    Case([1, 0, 64, 65, 200]).check()


@pytest.mark.parametrize("parts", [1, 4])
def test_a_sequence_of_nan_shows_it_and_spoils_no_other(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    cut(monkeypatch, parts)
    case = Case([40, 150, 21])
    q = case.queries(3)
    q[1] = torch.nan
    out = case.decode(q)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("parts", [1, 3])
def test_a_sequence_decodes_the_same_alone_and_in_a_batch(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    cut(monkeypatch, parts)
    case = Case([100, 3, 0, 64])
    q = case.queries(4)
    together = case.decode(q)
    for i, n in enumerate(case.lens):
        alone = paged_decode(q[i : i + 1], *case.caches, case.tables[i : i + 1], case.int32([n]), SCALE)
        assert torch.equal(alone, together[i : i + 1])


def test_queries_and_tables_with_gaps_between_them() -> None:
    case = Case([20, 90])
    q = case.queries(2)
    exact = case.decode(q)
    wide = torch.zeros(2, 64, dtype=torch.int32, device=DEVICE)
    wide[:, : case.tables.shape[1]] = case.tables
    case.tables = wide[:, : case.tables.shape[1]]
    ragged = torch.zeros(2 * q.numel() + 1, dtype=q.dtype, device=DEVICE)
    projections = torch.zeros(2, 7, q.shape[2], device=DEVICE)
    projections[:, 1:5] = q
    ragged[1::2] = q.flatten()
    unaligned = torch.cat([q.new_zeros(1), q.flatten()])[1:].view_as(q)
    for other in (
        projections[:, 1:5],
        ragged[1::2].view_as(q),
        unaligned,
        q.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        assert torch.equal(case.decode(other), exact)


def test_no_sequences() -> None:
    case = Case([5])
    nothing = case.int32([])
    assert paged_decode(case.queries(0), *case.caches, case.tables[:0], nothing, SCALE).shape == (0, 4, 32)


@pytest.mark.parametrize(
    "caches",
    [
        lambda k, v: (k, v.transpose(1, 2).contiguous().transpose(1, 2)),
        lambda k, v: (k[..., ::2], v[..., ::2]),
        lambda k, v: (k[..., 1:17], v[..., 1:17]),
        lambda k, v: tuple(torch.zeros(3, 16, 2, 17)[..., :16] for _ in (k, v)),
    ],
    ids=["strides differ", "gaps", "off the mark", "odd strides"],
)
def test_a_cache_that_lies_otherwise_is_refused(caches: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> None:
    k, v = torch.zeros(2, 3, 16, 2, 32)
    assert cache_strides(k, v) == (1024, 64, 32)
    with pytest.raises(ValueError, match=r"same|16 bytes"):
        cache_strides(*caches(k, v))


# ---- how many parts


@given(
    num_seqs=st.integers(0, 1000),
    num_kv_heads=st.integers(1, 32),
    longest=st.integers(1, 1 << 18),
    num_sms=st.integers(1, 200),
)
def test_parts_are_few_and_never_more_than_tiles(num_seqs: int, num_kv_heads: int, longest: int, num_sms: int) -> None:
    parts = count_parts(num_seqs, num_kv_heads, longest, num_sms)
    assert 1 <= parts <= min(MAX_PARTS, math.ceil(longest / STEP))
    if longest <= module.LONGEST_PART:
        assert parts == 1 or num_seqs * num_kv_heads * parts <= num_sms * module.PROGRAMS_PER_SM


@pytest.mark.parametrize(
    ("num_seqs", "longest", "parts"),
    [(64, 2048, 1), (256, 2048, 1), (1, 1024, 16), (1, 32768, 66), (16, 2048, 4), (1, 16, 1), (64, 32768, 4)],
)
def test_parts_on_132_multiprocessors_with_8_kv_heads(num_seqs: int, longest: int, parts: int) -> None:
    assert count_parts(num_seqs, 8, longest, 132) == parts
