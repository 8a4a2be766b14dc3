"""Attention in Triton kernels: any step however it is launched and cut into parts, and what no drawn step reaches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from nanoengine.attention.triton import TritonAttention
from nanoengine.core.attention import AttentionMetadata, AttentionSpec
from nanoengine.kernels.triton import paged_decode as module
from nanoengine.kernels.triton import split_kv
from nanoengine.kernels.triton.paged_cache import cache_strides
from nanoengine.kernels.triton.paged_decode import CANDIDATES, MOST_ROWS, ROWS
from nanoengine.kernels.triton.split_kv import STEP
from nanoengine.kernels.triton.tuning import DEFAULTS, Tuning
from tests.attention.contract import check_step
from tests.attention.every_backend import DEVICE, TRITON, written_in_torch
from tests.attention.paged import PLAIN, Heads, Pool, Sequences, assert_attended
from tests.kernels.noting import Launch, noting

UNCUT = replace(DEFAULTS, decode_programs_per_sm=1, decode_longest_part=1 << 20)
"""No sequence is cut where others fill the device."""

CUT = replace(UNCUT, decode_longest_part=STEP)
"""Every sequence is cut into as many parts as it has steps."""

FULL = AttentionSpec(0.3, window=100, sinks=True, soft_cap=9.0)
SCALED = replace(PLAIN, scale=0.3)
whole_or_in_parts = pytest.mark.parametrize("tuning", [UNCUT, CUT], ids=["whole", "in parts"])


@pytest.fixture(autouse=True)
def everything_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of which one program fills a multiprocessor, so that parts are those of the tuning."""
    monkeypatch.setattr(module, "num_multiprocessors", lambda *_: 1)
    with DEVICE:
        yield


def pool_of(
    heads: Heads,
    lens: Sequence[int],
    tuning: Tuning = UNCUT,
    spec: AttentionSpec = SCALED,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Pool:
    """All tokens of all sequences are in the cache."""
    backend = written_in_torch(TritonAttention(block_size, tuning))
    pool = Pool(Sequences(heads, block_size, lens, dtype), backend, norms=False, rotated=False, spec=spec)
    pool.fill(lens)
    return pool


def last(pool: Pool, counts: Sequence[int]) -> tuple[Tensor, AttentionMetadata]:
    """The queries of the last tokens of each sequence, and of a step of these."""
    lens = pool.sequences.lens
    starts = [n - count for n, count in zip(lens, counts, strict=True)]
    width = pool.sequences.heads.num * pool.sequences.heads.group
    parts = [
        qkv[start:].unflatten(1, (-1, pool.sequences.heads.dim))[:, :width]
        for qkv, start in zip(pool.sequences.qkv, starts, strict=True)
    ]
    return torch.cat(parts), pool.metadata(len(lens), range(len(lens)), starts, lens)


def attend(pool: Pool, q: Tensor, metadata: AttentionMetadata) -> Tensor:
    """The workspace is left as it was found."""
    out = pool.backend.attend(q, pool.kv, metadata, pool.spec, pool.sinks)
    assert isinstance(pool.backend, TritonAttention)
    assert not pool.backend._workspace.counters(1, DEVICE).any()
    return out


def check(pool: Pool, counts: Sequence[int] | None = None, looser: int = 1) -> None:
    lens = pool.sequences.lens
    counts = counts or [min(1, n) for n in lens]
    exact = pool.exact([n - count for n, count in zip(lens, counts, strict=True)], lens)
    assert_attended(attend(pool, *last(pool, counts)), exact, looser)


# ---- any step

LARGE = replace(TRITON, block_sizes=(16, 32, 128, 256), head_dims=(16, 32, 64, 128, 256), longest=330, work=40_000)


@pytest.mark.parametrize("part", range(4))
def test_any_step_however_it_is_launched(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(part, 60, 4):
        rng = random.Random(seed)
        tile, warps, stages = rng.choice(CANDIDATES)
        longest_part = rng.choice([STEP, STEP, 100, 2 * STEP, 1 << 20])
        tuning = replace(DEFAULTS, decode_tile=tile, decode_warps=warps, decode_stages=stages)
        tuning = replace(tuning, decode_programs_per_sm=rng.choice([1, 8]), decode_longest_part=longest_part)
        num_sms = rng.choice([1, 1, 7, 132])
        monkeypatch.setattr(module, "num_multiprocessors", lambda *_, num_sms=num_sms: num_sms)
        check_step(LARGE, lambda size, t=tuning: written_in_torch(TritonAttention(size, t)), seed)  # type: ignore[misc]


@whole_or_in_parts
def test_sequences_that_have_several_tokens_one_or_none(tuning: Tuning) -> None:
    check(pool_of(Heads(1, 2, 32), [3, 17, 0, 16, 64, 131, 90, 300], tuning), [3, 1, 0, 4, 2, 4, 0, 3])
    check(pool_of(Heads(2, 1, 32), [70, 0, 130, 0], tuning), [1, 0, 1, 0])
    together = pool_of(Heads(1, 2, 32), [300, 259], tuning, replace(SCALED, window=8 * ROWS))
    check(together, [4, 5])  # they see more than each, and in more parts than what each sees has


def test_more_parts_than_are_combined_at_once() -> None:
    """The last lot is full or is not."""
    at_once = module._constants(2, 1, 256, 64, 16, num_warps=8, launch=0)["AT_ONCE"]
    assert at_once == 8
    check(pool_of(Heads(1, 2, 256), [8 * STEP, 8 * STEP + 1, 17 * STEP - 3], CUT, block_size=256))


def test_where_parts_would_be_too_many_they_are_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (module, split_kv):
        monkeypatch.setattr(each, "MAX_PARTS", 4)
    check(pool_of(Heads(1, 1, 16), [7 * STEP, 7 * STEP - 5, 3 * STEP + 1, STEP, 0], CUT))


@pytest.mark.parametrize("num_decodes", [0, 1])
@pytest.mark.parametrize("sink", [-math.inf, -1e4, 1e4])
def test_sinks_take_their_weight_once_and_whatever_they_are(sink: float, num_decodes: int) -> None:
    """From no weight to all of it, even of tokens that see nothing in the first part, or nothing in the last."""
    pool = pool_of(Heads(1, 4, 32), [260], CUT, replace(FULL, window=30))
    pool.sinks = torch.full((4,), sink)
    q, metadata = last(pool, [20])
    assert_attended(attend(pool, q, replace(metadata, num_decodes=num_decodes)), pool.exact([240], [260]))


@pytest.mark.parametrize("scale", [0.0, 20.0])
@pytest.mark.parametrize("spec", [PLAIN, replace(FULL, soft_cap=0.5)], ids=["plain", "full"])
@pytest.mark.parametrize("num_decodes", [0, 1])
def test_scores_that_are_equal_and_scores_far_apart(num_decodes: int, spec: AttentionSpec, scale: float) -> None:
    pool = pool_of(Heads(1, 2, 32), [170], CUT, replace(spec, scale=scale))
    q, metadata = last(pool, [20])
    out = attend(pool, q, replace(metadata, num_decodes=num_decodes))
    torch.testing.assert_close(out.double(), pool.exact([150], [170]).out, rtol=1e-4, atol=1e-4)


# ---- what else is in a batch


def test_parts_that_nobody_wrote_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in memory before: here NaN is."""
    pool, empty = pool_of(Heads(2, 2, 32), [1, 0, 64, 65, 200], CUT), torch.empty
    step = last(pool, [1, 0, 1, 1, 1])
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan))
    assert_attended(attend(pool, *step), pool.exact([0, 0, 63, 64, 199], pool.sequences.lens))


@whole_or_in_parts
def test_a_sequence_decodes_the_same_alone_and_in_a_batch(tuning: Tuning) -> None:
    """And again, in the same workspace."""
    pool, counts = pool_of(Heads(2, 2, 32), [150, 3, 0, 64], tuning), [4, 2, 0, 1]
    q, metadata = last(pool, counts)
    together, first = attend(pool, q, metadata), 0
    assert torch.equal(attend(pool, q, metadata), together)
    for i, count in enumerate(counts):
        n, rows = pool.sequences.lens[i], slice(first, first + count)
        if count:
            bounded = replace(pool.metadata(1, [i], [n - count], [n]), query_lens_list=[4])
            assert torch.equal(attend(pool, q[rows], bounded), together[rows])
        first += count


@whole_or_in_parts
@pytest.mark.parametrize("spec", [SCALED, FULL], ids=["plain", "full"])
def test_padding_with_more_tokens_than_there_may_be_changes_nothing(tuning: Tuning, spec: AttentionSpec) -> None:
    """All that is left of a recorded step is a run of its own, of length 0. Its blocks are nobody's."""
    pool, padding = pool_of(Heads(2, 2, 32), [150, 40], tuning, spec), 90
    q, metadata = last(pool, [4, 3])
    alone = attend(pool, q, metadata)
    nowhere = torch.full_like(metadata.block_tables, 1 << 30)
    padded = replace(
        metadata,
        num_decodes=4,
        query_start_loc=torch.tensor([0, 4, 7, 7 + padding, 7 + padding], dtype=torch.int32),
        seq_lens=torch.tensor([150, 40, 0, 0], dtype=torch.int32),
        block_tables=torch.cat([metadata.block_tables, nowhere]),
        query_lens_list=[4, 3, 4, 0],
        seq_lens_list=[150, 40, 0, 0],
    )
    more = torch.cat((q, torch.randn(padding, *q.shape[1:])))
    assert torch.equal(attend(pool, more, padded)[:7], alone)
    chunks = replace(padded, num_decodes=0, query_lens_list=[4, 3, padding, 0])
    prefilled = attend(pool, more, chunks)
    torch.testing.assert_close(prefilled[:7], alone, rtol=0, atol=1e-5)
    assert not prefilled[7:].any(), "a padding row is zeros"


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has an order of its own")
def test_whoever_comes_last_combines_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(Heads(1, 2, 16), [3 * STEP, 2 * STEP - 1, 2], CUT)
    step = last(pool, [1, 1, 1])
    expected = attend(pool, *step)
    builder = triton.runtime.interpreter.interpreter_builder
    set_place = builder.set_grid_idx
    for order in permutations(range(3)):
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z, order=order: set_place(x, y, order[z]))
        assert torch.equal(attend(pool, *step), expected)


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


def launch_of(
    heads: Heads, tuning: Tuning, *, width: int = 20, longest: int = 1, dtype: torch.dtype = torch.float32, **asked: Any
) -> Launch:
    """How one sequence is decoded that has a block table of that width."""
    pool = pool_of(heads, [40], tuning, replace(SCALED, **asked), dtype=dtype)
    q, metadata = last(pool, [longest])
    with noting() as launches:
        attend(pool, q, replace(metadata, block_tables=torch.zeros(1, width, dtype=torch.int32)))
    [launch] = launches
    return launch


@pytest.mark.parametrize(("window", "parts"), [(None, 66), (128, 2), (8192, 66), (512, 8), (-512, 8)])
def test_a_launch_has_programs_for_what_can_be_seen_and_no_more(
    monkeypatch: pytest.MonkeyPatch, window: int | None, parts: int
) -> None:
    """However long the sequence is that a block table has room for, and however long the one is that is there."""
    monkeypatch.setattr(module, "num_multiprocessors", lambda *_: 132)
    asked = {"window": window and abs(window), "chunked": (window or 0) < 0}
    assert launch_of(Heads(8, 1, 16), DEFAULTS, width=32_768 // 16, **asked).grid == (8, 1, parts)


def test_a_launch_depends_on_bounds_alone() -> None:
    with noting() as launches:
        for lens, counts in (([150, 40], [4, 1]), ([9, 3], [1, 1])):
            pool = pool_of(Heads(2, 2, 32), lens, CUT, FULL)
            q, metadata = last(pool, counts)
            tables = torch.zeros(2, 20, dtype=torch.int32)
            attend(pool, q[:2], replace(metadata, block_tables=tables, query_lens_list=[5, 5]))
    assert (launches[0].grid, launches[0].key()) == (launches[1].grid, launches[1].key())


@pytest.mark.parametrize("dependent", [False, True])
def test_it_is_launched_early_if_it_is_tuned_so(dependent: bool) -> None:
    tuning = replace(UNCUT, decode_tile=16, decode_warps=2, decode_stages=5, dependent_launch=dependent)
    found = launch_of(Heads(2, 20, 32), tuning, dtype=torch.bfloat16)
    assert found.grid == (4, 1, 1)
    assert (found.values["LAUNCH"], found.values["TILE"]) == (dependent, 64)
    assert found.options == {"num_warps": 2, "num_stages": 5} | ({"launch_pdl": True} if dependent else {})


@pytest.mark.parametrize(
    ("group", "longest", "rows", "queries", "lots"),
    [
        (1, 3, 16, 16, 1),
        (2, 1, 16, 1, 1),
        (2, 8, 16, 8, 1),
        (2, 9, 32, 16, 1),
        (2, 17, 32, 32, 2),
        (5, 3, 32, 4, 1),
        (8, 8, 32, 8, 2),
        (20, 3, 32, 4, 4),
    ],
)
def test_tiles_are_filled_and_no_larger_than_they_must(
    group: int, longest: int, rows: int, queries: int, lots: int
) -> None:
    """A few kernels do for all lengths."""
    found = launch_of(Heads(3, group, 32), UNCUT, longest=longest)
    assert (found.values["ROWS"], found.values["QUERIES"], found.grid[0]) == (rows, queries, 3 * lots)
    assert ROWS <= rows <= MOST_ROWS


@pytest.mark.parametrize(("head_dim", "tile"), [(16, 64), (64, 64), (128, 32), (256, 16)])
def test_tiles_of_other_heads_have_as_many_bytes_if_they_can(head_dim: int, tile: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert module.tile_shape(dtype, head_dim, DEFAULTS) == (tile, DEFAULTS.decode_warps, DEFAULTS.decode_stages)
    assert module.tile_shape(torch.float32, head_dim, DEFAULTS) == (16, 8, 3)
    assert module.tile_shape(torch.bfloat16, 128, DEFAULTS) in CANDIDATES


def test_short_prompts_have_smaller_programs() -> None:
    tuning = replace(DEFAULTS, short_prompt=40)
    for count, shape in ((20, (64, 4, 4)), (40, (64, 4, 4)), (41, (128, 8, 5))):
        pool = pool_of(Heads(1, 2, 32), [50], tuning, dtype=torch.bfloat16)
        q, metadata = last(pool, [count])
        with noting() as launches:
            attend(pool, q, replace(metadata, num_decodes=0))
        [launch] = launches
        assert (launch.values["ROWS"], launch.options["num_warps"], launch.options["num_stages"]) == shape


def test_engines_do_not_count_together() -> None:
    """Their launches may run at the same time."""
    first, second = TritonAttention(16), TritonAttention(16)
    assert first._workspace.counters(1, DEVICE).data_ptr() != second._workspace.counters(1, DEVICE).data_ptr()
