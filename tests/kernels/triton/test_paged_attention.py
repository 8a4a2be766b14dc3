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

from nanoengine.core.attention import AttentionMetadata, AttentionSpec
from nanoengine.kernels.triton.attention import paged_decode
from nanoengine.kernels.triton.attention.attend_range import ROWS
from nanoengine.kernels.triton.attention.backend import TritonAttention
from nanoengine.kernels.triton.attention.decode_shape import COMBINED
from nanoengine.kernels.triton.attention.equal_splits import STEP
from nanoengine.kernels.triton.attention.paged_cache import PagedCache, cache_strides
from nanoengine.kernels.triton.tuning import DEFAULTS, Tuning
from tests.kernels.attention.contract import check_step
from tests.kernels.attention.every_backend import DEVICE, TRITON, written_in_torch
from tests.kernels.attention.paged import PLAIN, Heads, Pool, Sequences, assert_attended
from tests.kernels.noting import noting

ONE = replace(DEFAULTS, decode_programs_per_sm=1)
DRAFTED_STEP = 8 * ROWS
"""Tokens that splits begin at multiples of, where those of drafts fill 16 rows."""

FULL = AttentionSpec(0.3, window=100, sinks=True, soft_cap=9.0)
SCALED = replace(PLAIN, scale=0.3)
whole_or_in_parts = pytest.mark.parametrize("in_parts", [False, True], indirect=True, ids=["whole", "in parts"])


def cut(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    """How many programs a device has side by side."""
    monkeypatch.setattr(paged_decode, "num_multiprocessors", lambda *_: splits)


@pytest.fixture(autouse=True)
def everything_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No sequence is cut, and memory holds what nobody has written."""
    empty = torch.empty

    def unset(*shape: int, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        return made.fill_(torch.nan if made.dtype.is_floating_point else -(1 << 30))

    monkeypatch.setattr(torch, "empty", unset)
    cut(monkeypatch, 1)
    with DEVICE:
        yield


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Every long sequence is cut."""
    if getattr(request, "param", True):
        cut(monkeypatch, 12)


def pool_of(
    heads: Heads,
    lens: Sequence[int],
    tuning: Tuning = ONE,
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

LARGE = replace(TRITON, block_sizes=(16, 32, 128, 256), head_dims=(16, 32, 48, 64, 128, 256), longest=330, work=40_000)


@pytest.mark.parametrize("part", range(4))
def test_any_step_however_it_is_launched(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(part, 40, 4):
        rng = random.Random(seed)
        tile, warps, stages = rng.choice([(32, 4, 5), (16, 2, 7), (64, 4, 5)])
        tuning = replace(DEFAULTS, decode_tile=tile, decode_warps=warps, decode_stages=stages)
        tuning = replace(tuning, decode_programs_per_sm=rng.choice([1, 8]), short_prompt=rng.choice([0, 400]))
        tuning = replace(tuning, prefill_tile=rng.choice([32, 64]), short_tile=rng.choice([32, 64]))
        cut(monkeypatch, rng.choice([1, 3, 10, 40, 132]))
        check_step(LARGE, lambda size, t=tuning: written_in_torch(TritonAttention(size, t)), seed)  # type: ignore[misc]


@pytest.mark.usefixtures("in_parts")
@whole_or_in_parts
def test_sequences_that_have_several_tokens_one_or_none() -> None:
    check(pool_of(Heads(1, 2, 32), [3, 17, 0, 16, 64, 131, 90, 300]), [3, 1, 0, 4, 2, 4, 0, 3])
    check(pool_of(Heads(2, 1, 32), [70, 0, 130, 0]), [1, 0, 1, 0])
    together = pool_of(Heads(1, 2, 32), [300, 259], spec=replace(SCALED, window=DRAFTED_STEP))
    check(together, [4, 5])  # they see more than each, and in more parts than what each sees has


@pytest.mark.parametrize(
    ("lens", "counts"), [([1, 64, 65, 200, 128, 63], None), ([300, 17, 520, 129], [4, 1, 3, 2])], ids=["one", "several"]
)
def test_shares_that_end_anywhere(lens: list[int], counts: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may end one sequence and begin another, and have all of neither. There may be more than there is work for."""
    pool = pool_of(Heads(1, 3, 16), lens)
    for splits in (3, 5, 7, 40):
        cut(monkeypatch, splits)
        check(pool, counts)


@pytest.mark.usefixtures("in_parts")
def test_more_parts_than_are_combined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last lot is full or is not."""
    assert COMBINED * 8 // (2 * 256) == 8
    cut(monkeypatch, 8 + 9 + 17)
    check(pool_of(Heads(1, 2, 256), [8 * STEP, 8 * STEP + 1, 17 * STEP - 3], block_size=256))
    assert 2 * COMBINED * 8 // (16 * 64) == 8
    cut(monkeypatch, 8 + 9)
    check(pool_of(Heads(1, 2, 64), [8 * DRAFTED_STEP, 8 * DRAFTED_STEP + 1]), [2, 2])


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize(("num_decodes", "count"), [(0, 20), (1, 20), (1, 1)])
@pytest.mark.parametrize("sink", [-math.inf, -1e4, 1e4])
def test_sinks_take_their_weight_once_and_whatever_they_are(sink: float, num_decodes: int, count: int) -> None:
    """From no weight to all of it, even of tokens that see nothing in the first part, or nothing in the last."""
    pool = pool_of(Heads(1, 4, 32), [260], spec=replace(FULL, window=30))
    pool.sinks = torch.full((4,), sink)
    q, metadata = last(pool, [count])
    assert_attended(attend(pool, q, replace(metadata, num_decodes=num_decodes)), pool.exact([260 - count], [260]))


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("spec", [replace(PLAIN, scale=20.0), replace(FULL, soft_cap=0.5, scale=0.0)], ids=str)
@pytest.mark.parametrize(("num_decodes", "count"), [(0, 20), (1, 20), (1, 1)])
def test_scores_that_are_equal_and_scores_far_apart(num_decodes: int, count: int, spec: AttentionSpec) -> None:
    pool = pool_of(Heads(1, 2, 32), [170], spec=spec)
    q, metadata = last(pool, [count])
    out = attend(pool, q, replace(metadata, num_decodes=num_decodes))
    torch.testing.assert_close(out.double(), pool.exact([170 - count], [170]).out, rtol=1e-4, atol=1e-4)


# ---- what else is in a batch


@pytest.mark.usefixtures("in_parts")
@whole_or_in_parts
def test_drafts_are_decoded_the_same_alone_and_in_a_batch() -> None:
    """To rounding, since a batch is cut as a whole. And the same to the bit again, in the same workspace."""
    pool, counts = pool_of(Heads(2, 2, 32), [150, 3, 0, 64]), [4, 2, 0, 1]
    q, metadata = last(pool, counts)
    together, first = attend(pool, q, metadata), 0
    assert torch.equal(attend(pool, q, metadata), together)
    for i, count in enumerate(counts):
        n, rows = pool.sequences.lens[i], slice(first, first + count)
        if count:
            bounded = replace(pool.metadata(1, [i], [n - count], [n]), query_lens_list=[4])
            torch.testing.assert_close(attend(pool, q[rows], bounded), together[rows], rtol=0, atol=1e-5)
        first += count


@pytest.mark.usefixtures("in_parts")
@whole_or_in_parts
@pytest.mark.parametrize("spec", [SCALED, FULL], ids=["plain", "full"])
def test_padding_with_more_tokens_than_there_may_be_changes_nothing(spec: AttentionSpec) -> None:
    """All that is left of a recorded step is a run of its own, of length 0. Its blocks are nobody's."""
    pool, padding = pool_of(Heads(2, 2, 32), [150, 40], spec=spec), 90
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
    torch.testing.assert_close(attend(pool, more, padded)[:7], alone, rtol=0, atol=1e-5)
    chunks = replace(padded, num_decodes=0, query_lens_list=[4, 3, padding, 0])
    prefilled = attend(pool, more, chunks)
    torch.testing.assert_close(prefilled[:7], alone, rtol=0, atol=1e-5)
    assert not prefilled[7:].any(), "a padding row is zeros"


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has an order of its own")
@pytest.mark.parametrize(("count", "step"), [(1, STEP), (2, DRAFTED_STEP)])
def test_whoever_comes_last_combines_the_same(count: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three splits."""
    cut(monkeypatch, 3)
    pool = pool_of(Heads(1, 2, 16), [3 * step, 2 * step - 1, 2])
    q, metadata = last(pool, [count] * 3)
    expected = attend(pool, q, metadata)
    builder = triton.runtime.interpreter.interpreter_builder
    set_place = builder.set_grid_idx
    for order in permutations(range(3)):

        def in_order(lot: int, split: int, last: int, order: Sequence[int] = order) -> None:
            set_place(lot, order[split] if builder.grid_dim[1] == 3 else split, last)

        monkeypatch.setattr(builder, "set_grid_idx", in_order)
        assert torch.equal(attend(pool, q, metadata), expected)


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
    assert cache_strides(PagedCache(k, v)) == (1024, 64, 32)
    with pytest.raises(ValueError, match=r"same|16 bytes"):
        cache_strides(PagedCache(*caches(k, v)))


# ---- how it is launched


def test_a_launch_depends_on_bounds_alone() -> None:
    with noting() as launches:
        for lens, counts in (([150, 40], [4, 1]), ([9, 3], [1, 1])):
            pool = pool_of(Heads(2, 2, 32), lens, spec=FULL)
            q, metadata = last(pool, counts)
            tables = torch.zeros(2, 20, dtype=torch.int32)
            attend(pool, q[:2], replace(metadata, block_tables=tables, query_lens_list=[5, 5]))
    first, second = ([(each.grid, each.key()) for each in half] for half in (launches[:2], launches[2:]))
    assert first == second


@pytest.mark.parametrize("dependent", [0, 2])
def test_layers_plan_once_for_each_window_and_the_others_are_launched_early_if_it_is_tuned_so(dependent: int) -> None:
    """The launch behind the one that plans is none that may begin before it ends."""
    tuning = replace(ONE, decode_tile=16, decode_warps=2, decode_stages=5, dependent_launch=dependent)
    pool = pool_of(Heads(2, 20, 32), [40], tuning, dtype=torch.bfloat16)
    q, metadata = last(pool, [2])
    with noting() as launches:
        for window in (None, 30, None, 30):
            pool.backend.attend(q, pool.kv, metadata, replace(SCALED, window=window))
    names, early = ["_plan_kernel", "_decode_kernel"] * 2 + ["_decode_kernel"] * 2, min(dependent, 1)
    assert [launch.name for launch in launches] == names
    assert [launch.values["LAUNCH"] for launch in launches] == [early, 0, early, 0, early, early]
    assert [launch.options.pop("launch_pdl", False) for launch in launches] == [
        launch.values["LAUNCH"] > 0 for launch in launches
    ]
    assert launches[-1].grid == (4, 1)
    assert launches[-1].values["TILE"] == 64
    assert launches[-1].options == {"num_warps": 2, "num_stages": 5, "maxnreg": 255}


@pytest.mark.parametrize("counts", [[1, 1], [2, 1], [2, 2], [1, 0]])
def test_what_drafts_take_is_not_taken_by_decodes_of_one_token_each(counts: list[int]) -> None:
    pool = pool_of(Heads(1, 2, 16), [20, 3])
    with noting() as launches:
        attend(pool, *last(pool, counts))
    assert [launch.values["query_start_loc"] is None for launch in launches] == [counts == [1, 1]] * 2


def test_short_prompts_have_smaller_programs() -> None:
    of_64 = replace(DEFAULTS, short_prompt=40)
    of_32 = replace(of_64, prefill_tile=32, short_tile=32)
    for tuning, count, shape in (
        (of_64, 20, (64, 64, 4, 4, None)),
        (of_64, 40, (64, 64, 4, 4, None)),
        (of_64, 41, (128, 64, 8, 5, None)),
        (of_32, 40, (64, 32, 4, 5, 168)),
        (of_32, 41, (128, 32, 8, 5, 128)),
    ):
        pool = pool_of(Heads(1, 2, 32), [50], tuning, dtype=torch.bfloat16)
        q, metadata = last(pool, [count])
        with noting() as launches:
            attend(pool, q, replace(metadata, num_decodes=0))
        [launch] = launches
        options = (launch.options.get(name) for name in ("num_warps", "num_stages", "maxnreg"))
        assert (launch.values["ROWS"], launch.values["TILE"], *options) == shape


def test_engines_do_not_count_together() -> None:
    """Their launches may run at the same time, and each adds up in counters of its own which of its parts are done."""
    first, second = TritonAttention(16), TritonAttention(16)
    assert first._workspace.counters(1, DEVICE).data_ptr() != second._workspace.counters(1, DEVICE).data_ptr()
