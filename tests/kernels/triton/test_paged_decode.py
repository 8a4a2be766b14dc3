"""Decoding over paged K/V against the formula in float64: every length, group and cut, and nothing read that is not there."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux on x86-64 alone")

import triton

from nanoengine.kernels.triton import paged_decode as module
from nanoengine.kernels.triton import split_kv
from nanoengine.kernels.triton.paged_cache import cache_strides
from nanoengine.kernels.triton.paged_decode import CANDIDATES, ROWS, paged_decode
from nanoengine.kernels.triton.split_kv import STEP, Workspace
from nanoengine.kernels.triton.tuning import DEFAULTS, Tuning

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE = 0.3
UNCUT = replace(DEFAULTS, decode_programs_per_sm=1, decode_longest_part=1 << 20)
"""No sequence is cut where others fill the device."""

CUT = replace(UNCUT, decode_longest_part=STEP)
"""Every sequence is cut into as many parts as it has steps."""

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""Largest error, relative to a value of size 1 or more. The interpreter cuts bfloat16 off where a GPU rounds it."""

all_dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float16", "bfloat16"])


@dataclass(frozen=True)
class Asked:
    """What a layer may ask for beside a scale."""

    window: int | None = None
    sinks: bool = False
    soft_cap: float | None = None

    def first_seen(self, position: int) -> int:
        """By the token at a position."""
        return 0 if self.window is None else max(0, position - self.window + 1)


PLAIN = Asked()
ASKED = [
    Asked(window=1),
    Asked(window=20),
    Asked(window=STEP + 1),
    Asked(window=40),
    Asked(sinks=True),
    Asked(soft_cap=2.0),
    Asked(window=150, sinks=True, soft_cap=5.0),
]
every_feature = pytest.mark.parametrize("asked", ASKED, ids=str)
drawn_features = st.builds(
    Asked,
    window=st.none() | st.integers(1, 200),
    sinks=st.booleans(),
    soft_cap=st.none() | st.floats(0.1, 50),  # a capped score is rounded by soft_cap * 2^-24
)


class Case:
    """Random K and V of some sequences, at shuffled blocks of a cache that is NaN wherever no token was written.

    Args:
        head_major: whether the cache has heads before slots; K and V of another layer lie between them in any case.
        asked: what is computed. Block tables then have block 0, which is NaN, before the first block that is seen.
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
        asked: Asked = PLAIN,
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
        self.workspace = Workspace()
        self.asked, self.sinks = asked, None
        if asked.sinks:
            self.sinks = 3 * torch.randn(self.num_heads, generator=self.generator).to(DEVICE)

    @property
    def options(self) -> dict[str, Any]:
        """What kernels are told."""
        asked = self.asked
        return {"window": asked.window, "soft_cap": asked.soft_cap, "sinks": self.sinks}

    def tables_from(self, positions: Sequence[int]) -> Tensor:
        """Block tables for queries from a position of each sequence on."""
        if self.asked.window is None:
            return self.tables
        tables = self.tables.clone()
        for table, position in zip(tables, positions, strict=True):
            table[: self.asked.first_seen(max(position, 0)) // self.block_size] = 0
        return tables

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def queries(self, count: int) -> Tensor:
        return self.random(count, self.num_heads, self.head_dim).to(DEVICE)

    def exact(self, i: int, q: Tensor, position: int, scale: float = SCALE) -> Tensor:
        """The result of the query [num_heads, head_dim] at a position of sequence i."""
        seen = slice(self.asked.first_seen(position), position + 1)
        k, v = (x[i][seen].double().repeat_interleave(self.group, 1) for x in (self.k, self.v))
        scores = torch.einsum("hd,thd->ht", q.cpu().double(), k) * scale
        if self.asked.soft_cap is not None:
            scores = self.asked.soft_cap * (scores / self.asked.soft_cap).tanh()
        if self.sinks is not None:
            scores, v = torch.cat([scores, self.sinks.cpu().double()[:, None]], 1), F.pad(v, (0, 0, 0, 0, 0, 1))
        return torch.einsum("ht,thd->hd", scores.softmax(-1), v)

    def decode(self, q: Tensor, scale: float = SCALE, *, to_fill: int = 1, tuning: Tuning = UNCUT) -> Tensor:
        """On a device that so many parts of every sequence fill. The workspace is left as it was found."""
        num_sms = to_fill * len(q) * self.num_heads // self.group * math.ceil(self.group / ROWS)
        sequences = self.tables_from([n - 1 for n in self.lens]), self.int32(self.lens)
        out = paged_decode(q, *self.caches, *sequences, scale, self.workspace, tuning, num_sms, **self.options)
        assert not self.workspace.counters(1, DEVICE).any()
        return out

    def check(self, *, to_fill: int = 1, tuning: Tuning = UNCUT) -> None:
        q = self.queries(len(self.lens))
        assert_near(self.decode(q, to_fill=to_fill, tuning=tuning), self.all_exact(q))

    def all_exact(self, q: Tensor, scale: float = SCALE) -> Tensor:
        """The results of the last tokens, and zeros for empty sequences."""
        zeros = torch.zeros(self.num_heads, self.head_dim, dtype=torch.float64)
        return torch.stack([self.exact(i, q[i], n - 1, scale) if n else zeros for i, n in enumerate(self.lens)])

    @staticmethod
    def int32(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)


def assert_near(out: Tensor, exact: Tensor) -> None:
    assert out.shape == exact.shape
    error = (out.cpu().double() - exact) / exact.abs().clamp(min=1)
    assert error.abs().max() <= TOLERANCE[out.dtype]  # never true of NaN


def in_bfloat16(tile: int, num_warps: int, num_stages: int, tuning: Tuning = UNCUT) -> Tuning:
    return replace(tuning, decode_tile=tile, decode_warps=num_warps, decode_stages=num_stages)


@all_dtypes
@pytest.mark.parametrize("to_fill", [1, 2, 5])
def test_lengths_around_tiles_and_blocks_with_empty_sequences_among_them(to_fill: int, dtype: torch.dtype) -> None:
    lens = [1, 15, 0, 16, 17, 31, 33, STEP - 1, STEP, STEP + 1, 0, 129, 200]
    Case(lens, 1, 2, dtype=dtype).check(to_fill=to_fill)


@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
@pytest.mark.parametrize("to_fill", [1, 3])
def test_blocks_smaller_and_larger_than_a_tile(to_fill: int, block_size: int) -> None:
    lens = [1, block_size - 1, block_size, block_size + 1, 150]
    Case(lens, 1, 1, 16, block_size=block_size).check(to_fill=to_fill)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 20])
@pytest.mark.parametrize("tuning", [UNCUT, CUT], ids=["whole", "in parts"])
def test_groups_of_every_size(tuning: Tuning, group: int) -> None:
    Case([5, 90, 300], 2, group).check(tuning=tuning)


@all_dtypes
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_heads_of_every_size(head_dim: int, dtype: torch.dtype) -> None:
    for tuning in (UNCUT, CUT):
        Case([3, 70, 130], 1, 2, head_dim, dtype=dtype).check(tuning=tuning)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
@pytest.mark.parametrize("tuning", [UNCUT, CUT], ids=["whole", "in parts"])
def test_every_candidate(tuning: Tuning, candidate: tuple[int, int, int]) -> None:
    for head_dim in (64, 128):
        case = Case([1, STEP + 1, 150], 1, 2, head_dim, dtype=torch.bfloat16)
        case.check(tuning=in_bfloat16(*candidate, tuning))


def test_more_parts_than_are_combined_at_once() -> None:
    """The last lot is full or is not."""
    at_once = module._constants(2, 1, 256, 64, 16, num_warps=8, dependent=False)["AT_ONCE"]
    assert at_once == 8
    case = Case([8 * STEP, 8 * STEP + 1, 17 * STEP - 3], 1, 2, 256, block_size=256)
    case.check(tuning=CUT)


def test_where_parts_would_be_too_many_they_are_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (module, split_kv):
        monkeypatch.setattr(each, "MAX_PARTS", 4)
    Case([7 * STEP, 7 * STEP - 5, 3 * STEP + 1, STEP, 0], 1, 1, 16).check(tuning=CUT)
    Case([7 * STEP, 1], 1, 1, 16).check(to_fill=50)


@every_feature
@pytest.mark.parametrize("tuning", [UNCUT, CUT], ids=["whole", "in parts"])
def test_every_feature_with_lengths_around_what_is_seen(tuning: Tuning, asked: Asked) -> None:
    Case([1, 16, 0, 21, 40, 66, 81, 160, 300], 1, 2, asked=asked).check(tuning=tuning)


@all_dtypes
def test_features_together(dtype: torch.dtype) -> None:
    Case([1, 90, 170, 300], 2, 3, dtype=dtype, asked=Asked(100, True, 3.0)).check(tuning=CUT)


@pytest.mark.parametrize("sink", [-math.inf, -1e4, 0.0, 1e4])
@pytest.mark.parametrize("tuning", [UNCUT, CUT], ids=["whole", "in parts"])
def test_sinks_take_their_weight_once_and_whatever_they_are(tuning: Tuning, sink: float) -> None:
    """From no weight to all of it."""
    case = Case([3, 200], 1, 20, asked=Asked(sinks=True))
    case.sinks = torch.full((20,), sink, device=DEVICE)
    case.check(tuning=tuning)


@settings(max_examples=25, deadline=None, database=None)
@given(
    lens=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([16, 32, 64]),
    block_size=st.sampled_from([16, 32, 128]),
    head_major=st.booleans(),
    to_fill=st.integers(1, 6),
    longest_part=st.sampled_from([STEP, 100, 2 * STEP, 1 << 20]),
    asked=drawn_features,
    seed=st.integers(0, 99),
)
def test_any_batch(
    lens: list[int],
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    head_major: bool,
    to_fill: int,
    longest_part: int,
    asked: Asked,
    seed: int,
) -> None:
    layout = {"block_size": block_size, "head_major": head_major}
    case = Case(lens, num_kv_heads, group, head_dim, **layout, asked=asked, seed=seed)
    case.check(to_fill=to_fill, tuning=replace(UNCUT, decode_longest_part=longest_part))


@pytest.mark.parametrize("scale", [0.0, 20.0])
@pytest.mark.parametrize("tuning", [UNCUT, CUT], ids=["whole", "in parts"])
@pytest.mark.parametrize("asked", [PLAIN, Asked(soft_cap=0.5), Asked(window=70, sinks=True)], ids=str)
def test_scores_that_are_equal_and_scores_far_apart(asked: Asked, tuning: Tuning, scale: float) -> None:
    case = Case([40, 170], 1, 2, asked=asked)
    q = case.queries(2)
    out = case.decode(q, scale, tuning=tuning)
    torch.testing.assert_close(out.cpu().double(), case.all_exact(q, scale), rtol=1e-4, atol=1e-4)


def test_parts_that_nobody_wrote_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in memory before: here NaN is."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan))
    Case([1, 0, 64, 65, 200]).check(to_fill=6)


@pytest.mark.parametrize("to_fill", [1, 4])
@pytest.mark.parametrize("asked", [PLAIN, Asked(100, True, 9.0)], ids=str)
def test_a_sequence_of_nan_shows_it_and_spoils_no_other(asked: Asked, to_fill: int) -> None:
    case = Case([40, 150, 21], asked=asked)
    q = case.queries(3)
    q[1] = torch.nan
    out = case.decode(q, to_fill=to_fill)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("to_fill", [1, 3])
def test_a_sequence_decodes_the_same_alone_and_in_a_batch(to_fill: int) -> None:
    case = Case([100, 3, 0, 64])
    q, lens, tables = case.queries(4), case.lens, case.tables
    together = case.decode(q, to_fill=to_fill)
    for i, n in enumerate(lens):
        case.lens, case.tables = [n], tables[i : i + 1]
        assert torch.equal(case.decode(q[i : i + 1], to_fill=to_fill), together[i : i + 1])


# ---- who combines


def test_the_same_workspace_does_for_one_launch_after_the_other() -> None:
    case = Case([200, 3, 0, 64, 65])
    q = case.queries(5)
    first = case.decode(q, tuning=CUT)
    for _ in range(3):
        assert torch.equal(case.decode(q, tuning=CUT), first)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has an order of its own")
def test_whoever_comes_last_combines_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([3 * STEP, 2 * STEP - 1, 2], 1, 2, 16)
    q = case.queries(3)
    expected = case.decode(q, tuning=CUT)
    builder = triton.runtime.interpreter.interpreter_builder
    set_place = builder.set_grid_idx
    for order in permutations(range(3)):
        place_of = [*order, 3]  # of the last part there is nothing: the table has room for it
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z, place_of=place_of: set_place(x, y, place_of[z]))
        assert torch.equal(case.decode(q, tuning=CUT), expected)


# ---- what it is given


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
    case.lens, case.tables = [], case.tables[:0]
    assert case.decode(case.queries(0)).shape == (0, 4, 32)


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


# ---- how it is launched


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of a launch that does not happen, and its grid."""
    found: dict[str, Any] = {}

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **options: found.update(options, grid=grid)

    monkeypatch.setattr(module, "_decode_kernel", Kernel())
    return found


@pytest.mark.parametrize(
    ("asked", "parts"),
    [(PLAIN, 66), (Asked(window=128), 2), (Asked(window=8192), 66), (Asked(window=512), 8)],
    ids=str,
)
def test_a_launch_has_programs_for_what_can_be_seen_and_no_more(
    launched: dict[str, Any], asked: Asked, parts: int
) -> None:
    """However long the sequence is that a block table has room for, and however long the one is that is there."""
    case = Case([5], 8, 1, 16, asked=asked)
    case.tables = torch.zeros(1, 32_768 // 16, dtype=torch.int32, device=DEVICE)
    q, lens, options = case.queries(1), case.int32([5]), case.options
    paged_decode(q, *case.caches, case.tables, lens, SCALE, case.workspace, DEFAULTS, 132, **options)
    assert launched["grid"] == (8, 1, parts)


@pytest.mark.parametrize("dependent", [False, True])
def test_it_is_launched_early_if_it_is_tuned_so(launched: dict[str, Any], dependent: bool) -> None:
    case = Case([200], 2, 20, dtype=torch.bfloat16)
    case.decode(case.queries(1), tuning=replace(in_bfloat16(16, 2, 5), dependent_launch=dependent))
    assert launched["grid"] == (4, 1, 1)
    assert launched["DEPENDENT"] == dependent
    assert launched.get("launch_pdl", False) == dependent
    assert (launched["TILE"], launched["num_warps"], launched["num_stages"]) == (64, 2, 5)


@pytest.mark.parametrize(("head_dim", "tile"), [(16, 64), (64, 64), (128, 32), (256, 16)])
def test_tiles_of_other_heads_have_as_many_bytes_if_they_can(head_dim: int, tile: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert module._shape(dtype, head_dim, DEFAULTS) == (tile, DEFAULTS.decode_warps, DEFAULTS.decode_stages)
    assert module._shape(torch.float32, head_dim, DEFAULTS) == (16, 8, 3)


def test_every_candidate_is_offered_to_be_compiled() -> None:
    offered = {
        (launch.constants["TILE"], launch.num_warps, launch.num_stages)
        for launch in module.launches()
        if (launch.signature["q"], launch.constants["HEAD_DIM"]) == ("*bf16", 128)
    }
    assert offered == set(CANDIDATES)
    assert module._shape(torch.bfloat16, 128, DEFAULTS) in CANDIDATES
