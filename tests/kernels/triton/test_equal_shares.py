"""Shares of decode attention: they are equal, hold all tokens once, and say the same as attention that is cut otherwise."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from nanoengine.attention.triton import TritonAttention
from nanoengine.core.attention import AttentionSpec
from nanoengine.kernels.triton import decode_in_shares as module
from nanoengine.kernels.triton import equal_shares
from nanoengine.kernels.triton.equal_shares import plan_shares
from nanoengine.kernels.triton.split_kv import STEP
from nanoengine.kernels.triton.tuning import DEFAULTS, Tuning
from tests.attention.contract import assert_same_memory, check_step
from tests.attention.every_backend import DEVICE, TRITON, write_in_torch, written_in_torch
from tests.attention.paged import PLAIN, THETA, Heads, Pool, Sequences, assert_attended
from tests.kernels.noting import noting
from tests.support import angles_at

SHARED = replace(DEFAULTS, decode_equal_shares=True, decode_programs_per_sm=1)
ROTATED = replace(SHARED, decode_rotates=True)
SCALED = replace(PLAIN, scale=0.3)
FULL = AttentionSpec(0.3, window=100, sinks=True, soft_cap=9.0)
DIM = 128 if DEVICE.type == "cuda" else 16
"""Of heads whose norms add up in one order, whichever kernel computes them. The interpreter has but one."""

LENS = [1, 0, 64, 65, 200, 128, 63, 0]
"""All around the ends of units; together 12 of these."""

STARTS = [max(0, n - 1) for n in LENS]


@pytest.fixture(autouse=True)
def everything_is_on_the_device() -> Iterator[None]:
    with DEVICE:
        yield


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many shares there are of what a KV head has."""
    count = [1]
    monkeypatch.setattr(module, "num_multiprocessors", lambda *_: count[0])
    return count


@contextmanager
def counting() -> Iterator[list[str]]:
    """The names of kernels, as the interpreter runs them."""
    names: list[str] = []
    getitem = InterpretedFunction.__getitem__

    def watched(kernel: Any, grid: Any) -> Any:
        names.append(kernel.fn.__name__)
        return getitem(kernel, grid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__getitem__", watched)
        yield names


# ---- plans


@settings(max_examples=40, deadline=None, database=None)
@given(
    lens=st.lists(st.one_of(st.integers(0, 3 * STEP), st.integers(0, 1 << 14)), min_size=1, max_size=40),
    num_shares=st.one_of(st.integers(1, 20), st.integers(1, 140)),
    window=st.sampled_from([0, 0, 1, STEP, 1000, -STEP, -100]),
    seqs=st.sampled_from([16, 256]),
)
def test_shares_are_equal_and_hold_every_token_once(lens: list[int], num_shares: int, window: int, seqs: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equal_shares, "SEQS", seqs)
        plan = plan_shares(torch.tensor(lens, dtype=torch.int32), num_shares, window).T.tolist()
    starts = [0] * len(lens)
    if window:
        starts = [max(0, n - window if window > 0 else max(n - 1, 0) // -window * -window) for n in lens]
    units = [
        (seq, start, n)
        for seq, (first, n) in enumerate(zip(starts, lens, strict=True))
        for start in range(first, max(n, first + 1), STEP)
    ]
    whose: dict[int, list[int]] = {}  # the shares that read something of a sequence
    begins = []
    for share in range(num_shares):
        begin, end = (bisect_left(units, tuple(plan[i][:2])) for i in (share, share + 1))
        assert end - begin in (len(units) // num_shares, -(-len(units) // num_shares))
        for seq, *_ in units[begin:end]:
            if whose.setdefault(seq, [share])[-1] != share:
                whose[seq].append(share)
        begins.append(begin)
    assert plan[0][:2] == list(units[0][:2])
    assert plan[-1][0] == len(lens)
    for share, (begin, found) in enumerate(zip([*begins, len(units)], plan, strict=True)):
        if begin < len(units):
            assert found[:3] == list(units[begin])
            assert found[3:] == [whose[units[begin][0]][0], len(whose[units[begin][0]])]
        else:
            assert (found[0], found[1], found[3]) == (len(lens), 0, share)


# ---- what attention says


LARGE = replace(TRITON, block_sizes=(16, 64), head_dims=(16, 32, 48, 128), longest=330, work=40_000)


@pytest.mark.parametrize("part", range(2))
def test_any_step(part: int, shares: list[int]) -> None:
    for seed in range(part, 40, 2):
        rng = random.Random(seed)
        shares[0] = rng.choice([1, 2, 5, 13, 100])
        tile, warps, stages = rng.choice([(32, 4, 7), (16, 2, 7), (64, 4, 5)])
        tuning = replace(SHARED, decode_tile=tile, decode_warps=warps, decode_stages=stages, short_prompt=400)
        check_step(LARGE, lambda size, t=tuning: written_in_torch(TritonAttention(size, t)), seed)  # type: ignore[misc]


def pool_of(heads: Heads, spec: AttentionSpec, tuning: Tuning, dtype: torch.dtype = torch.float32, **how: bool) -> Pool:
    """Sequences whose last tokens are not in the cache yet."""
    pool = Pool(Sequences(heads, 16, LENS, dtype), TritonAttention(16, tuning), spec=spec, **how)
    pool.layer.spec, pool.layer.sinks = spec, pool.sinks
    write = pool.backend.rotate_and_write
    pool.backend.rotate_and_write = None
    pool.backend.write_kv, kept = partial(write_in_torch, 16), pool.backend.write_kv  # type: ignore[method-assign]
    if not how.get("quantized"):
        pool.fill(STARTS)
    pool.backend.rotate_and_write, pool.backend.write_kv = write, kept  # type: ignore[method-assign]
    return pool


def decode(pool: Pool) -> Tensor:
    """What the last tokens see, those of padding too. Counters end at 0."""
    count = len(LENS)
    metadata = replace(
        pool.metadata(count, range(count), STARTS, LENS),
        query_start_loc=torch.arange(count + 1, dtype=torch.int32),
        query_lens_list=[1] * count,
        slot_mapping=torch.tensor([pool.sequences.slots(i, n - 1, n)[0] if n else -1 for i, n in enumerate(LENS)]),
    )
    nothing = torch.zeros_like(pool.sequences.qkv[0][:1])
    qkv = torch.cat([own[n - 1 :] if n else nothing for own, n in zip(pool.sequences.qkv, LENS, strict=True)])
    qkv = torch.cat((qkv, qkv), 1)[:, : qkv.shape[1]]  # with a gap between two tokens
    positions = torch.tensor(STARTS)
    angles = angles_at(positions, pool.sequences.heads.dim, THETA) if pool.rotated else None
    out = pool.layer(qkv, angles, metadata)
    assert isinstance(pool.backend, TritonAttention)
    assert not pool.backend._workspace.counters(1, DEVICE).any()
    return out


def check(pool: Pool, looser: int = 1) -> None:
    there = torch.tensor(LENS) > 0
    assert_attended(decode(pool)[there], pool.exact(STARTS, LENS), looser)


@pytest.mark.parametrize("spec", [SCALED, FULL, replace(FULL, chunked=True)], ids=["plain", "full", "chunked"])
def test_shares_that_end_anywhere_say_the_same(
    spec: AttentionSpec, shares: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one program that reads all to more than there is work for. What is in memory before is NaN."""
    pool, empty = pool_of(Heads(1, 3, 16), spec, ROTATED, norms=False, rotated=False), torch.empty

    def full(*shape: int, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        return made.fill_(torch.nan if made.dtype.is_floating_point else -(1 << 30))

    monkeypatch.setattr(torch, "empty", full)
    for shares[0] in (1, 2, 3, 5, 7, 11, 12, 13, 40):
        check(pool)


@pytest.mark.parametrize("heads", [Heads(2, 2, DIM), Heads(1, 20, DIM)], ids=["", "a group in two lots"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("norms", "rotated"), [(True, True), (False, False)])
def test_what_decodes_rotate_and_write_themselves_is_what_the_kernel_before_them_did(
    heads: Heads, dtype: torch.dtype, norms: bool, rotated: bool, shares: list[int]
) -> None:
    """K and V to the bit."""
    shares[0] = 5 * heads.num
    how = {"norms": norms, "rotated": rotated}
    together, apart = (pool_of(heads, FULL, tuning, dtype, **how) for tuning in (ROTATED, SHARED))
    with counting() as kernels:
        out = decode(together)
    assert DEVICE.type == "cuda" or kernels == ["_plan_kernel", "_shares_kernel"]
    with counting() as kernels:
        expected = decode(apart)
    assert DEVICE.type == "cuda" or kernels == ["_rotate_and_write_kernel", "_plan_kernel", "_shares_kernel"]
    assert_same_memory(together, apart)
    there = torch.tensor(LENS) > 0
    tolerance = 1e-5 if dtype is torch.float32 else 2.0**-6
    torch.testing.assert_close(out[there], expected[there], rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("shares")
def test_what_cannot_be_done_in_one_kernel_is_done_in_two() -> None:
    """Heads of other sizes, and caches of bytes."""
    for heads, quantized in product((Heads(1, 2, 48), Heads(1, 2, 32)), (True, False)):
        if quantized or heads.dim == 48:
            pool = pool_of(heads, SCALED, ROTATED, quantized=quantized)
            with counting() as kernels:
                decode(pool)
            assert DEVICE.type == "cuda" or kernels == ["_rotate_and_write_kernel", "_plan_kernel", "_shares_kernel"]


# ---- how it is launched


@pytest.mark.usefixtures("shares")
def test_layers_plan_once_for_each_window() -> None:
    """The launch behind the one that plans is none that may begin before it ends."""
    tuning = replace(ROTATED, dependent_launch=2)
    pool = pool_of(Heads(1, 2, 32), SCALED, tuning)
    runs = pool.metadata(len(LENS), range(len(LENS)), [n - 1 for n in LENS], LENS)
    metadata = replace(runs, query_lens_list=[1] * len(LENS), slot_mapping=torch.zeros(len(LENS), dtype=torch.int64))
    with noting() as launches:
        for window in (None, 100, None, 100):
            pool.layer.spec = replace(SCALED, window=window)
            pool.layer(torch.zeros(len(LENS), 4 * 32), angles_at(torch.tensor(STARTS), 32, THETA), metadata)
    names = ["_plan_kernel", "_shares_kernel"] * 2 + ["_shares_kernel"] * 2
    assert [launch.name for launch in launches] == names
    assert [launch.values["LAUNCH"] for launch in launches] == [1, 0, 1, 0, 1, 1]
    assert [launch.options.get("launch_pdl", False) for launch in launches] == [True, False, True, False, True, True]


@pytest.mark.parametrize(
    ("shape", "dim", "dtype", "quantized", "asked", "programs"),
    [
        ((32, 4, 7), 128, torch.bfloat16, False, 4, 4),
        ((32, 4, 7), 128, torch.bfloat16, False, 8, 4),
        ((32, 4, 5), 128, torch.bfloat16, False, 5, 5),
        ((16, 2, 7), 128, torch.bfloat16, False, 7, 7),
        ((64, 4, 5), 128, torch.bfloat16, False, 4, 3),
        ((32, 4, 7), 256, torch.bfloat16, False, 4, 3),
        ((32, 4, 7), 128, torch.bfloat16, True, 4, 3),
        ((32, 4, 7), 32, torch.float32, False, 4, 2),
    ],
)
def test_programs_are_as_many_as_a_multiprocessor_has_room_for(
    shape: tuple[int, int, int], dim: int, dtype: torch.dtype, quantized: bool, asked: int, programs: int
) -> None:
    """However many sequences there are."""
    tile, warps, stages = shape
    tuning = replace(SHARED, decode_tile=tile, decode_warps=warps, decode_stages=stages, decode_programs_per_sm=asked)
    pool = Pool(Sequences(Heads(1, 2, dim), 16, [3, 9], dtype), TritonAttention(16, tuning), quantized=quantized)
    with noting() as launches:
        pool.attend(2, torch.zeros(2, 2, dim, dtype=dtype), [0, 1], [2, 8], [3, 9])
    found = launches[-1]
    assert found.grid == (1, 132 * programs)
    registers = found.options["maxnreg"] * 32 * found.options["num_warps"]
    assert registers * programs <= 1 << 16


@pytest.mark.usefixtures("shares")
def test_several_tokens_of_a_sequence_are_cut_as_before() -> None:
    pool = pool_of(Heads(1, 2, 32), SCALED, ROTATED)
    metadata = pool.metadata(1, [4], [198], [200])
    metadata = replace(metadata, slot_mapping=torch.tensor(pool.sequences.slots(4, 198, 200)))
    with counting() as kernels:
        pool.layer(pool.sequences.qkv[4][198:], angles_at(torch.tensor([198, 199]), 32, THETA), metadata)
    assert DEVICE.type == "cuda" or kernels == ["_rotate_and_write_kernel", "_decode_kernel"]
