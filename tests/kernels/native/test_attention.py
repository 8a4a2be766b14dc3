"""What no drawn step of the native backend reaches: numbers at their ends, tokens that come later, large pools, odd tensors."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from nanoengine.core.attention import AttentionSpec
from nanoengine.kernels.memory import zeros_in_huge_pages
from nanoengine.kernels.native.attention import NativeAttention
from tests.kernels import formulas
from tests.kernels.attention.contract import FEW, draw_pool
from tests.kernels.attention.every_backend import NATIVE
from tests.kernels.attention.paged import PLAIN, Heads, Pool, Sequences
from tests.kernels.formulas import DTYPES
from tests.kernels.marks import needs_kernels

pytestmark = needs_kernels
SINKS = AttentionSpec(0.2, sinks=True)
in_both_ways = pytest.mark.parametrize("decoding", [False, True])


def native_pool(sequences: Sequences, spec: AttentionSpec = PLAIN) -> Pool:
    return Pool(sequences, NativeAttention(sequences.block_size), spec=spec)


# ---- numbers


@in_both_ways
def test_sinks_far_above_and_far_below_the_scores(decoding: bool) -> None:
    sequences = Sequences(Heads(2, 2, 32), 16, [600])
    pool, without = native_pool(sequences, SINKS), native_pool(sequences, replace(SINKS, sinks=False))
    pool.sinks = torch.tensor([1e4, -1e4, 0.0, -1e30])
    pool.fill(), without.fill()
    out, plain = (each.step(int(decoding), [599], [600]) for each in (pool, without))
    assert not out[:, 0].any()
    assert torch.equal(out[:, [1, 3]], plain[:, [1, 3]])
    assert not torch.equal(out[:, 2], plain[:, 2])


@in_both_ways
@pytest.mark.parametrize("soft_cap", [None, 0.5, 30.0])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 20.0, 1e3])
def test_scores_that_are_equal_or_far_apart(scale: float, soft_cap: float | None, decoding: bool) -> None:
    """Most weights are 0, the highest score moves from chunk to chunk and from part to part, and 0.0 is a score too."""
    lens = [700, 1100, 40, 1]
    pool = native_pool(Sequences(Heads(2, 3, 64), 16, lens), AttentionSpec(scale, soft_cap=soft_cap))
    starts = [n - 1 for n in lens] if decoding else [0, 1000, 0, 0]
    pool.fill(starts)
    out = pool.step(len(lens) * decoding, starts, lens)
    tolerance = max(1e-4, (1e-6 if soft_cap else 1e-4) * scale)  # a score is off by a millionth of the scale
    torch.testing.assert_close(out.double(), pool.exact(starts, lens).out, rtol=tolerance, atol=tolerance)


# ---- the write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [32, 96, 512])
@pytest.mark.parametrize(("before", "missing"), [(0, ()), (5, ()), (16, (3, 40, 41)), (9, (64,))])
def test_tokens_of_whole_tiles_are_written_as_they_are_alone(
    dtype: torch.dtype, head_dim: int, before: int, missing: tuple[int, ...]
) -> None:
    """At multiples of 16 and between them, some of them not at all; what else there is stays as it is."""
    backend, tokens, q_heads, kv_heads = NativeAttention(32), 90, 4, 2
    qkv = formulas.random(tokens, (q_heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=1)
    norm, cos, sin = (
        formulas.random(*shape, dtype=torch.float32, seed=seed)
        for seed, shape in enumerate([(head_dim,), (tokens, 1, head_dim // 2), (tokens, 1, head_dim // 2)])
    )
    slots = torch.arange(32 + before, 32 + before + tokens)
    slots[list(missing)] = -1
    made = []
    for count in (tokens, 16, 1):
        kv = tuple(torch.full(backend.kv_shape(6, kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(2))
        pieces = [slice(i, i + count) for i in range(0, tokens, count)]
        q = [backend.rotate_and_write(qkv[i], (norm, norm, 1e-6, cos[i], sin[i]), kv, slots[i]) for i in pieces]
        made.append((torch.cat(q), *kv))
    for some in made[1:]:
        assert all(map(torch.equal, made[0], some))


# ---- a few new tokens of each sequence


def check_alone(pool: Pool, starts: list[int]) -> None:
    """All tokens of all sequences from starts[i] on at once, then each by itself: when it is the last, all that come after it
    are NaN or infinite."""
    rows, lens = list(range(len(starts))), pool.sequences.lens
    pool.fill(starts)
    q = pool.write_span(rows, starts, lens)
    pool.forget(rows, starts)
    together = pool.attend(len(lens), q, rows, starts, lens)
    assert together.isfinite().all()
    tokens = [(i, position) for i in rows for position in range(starts[i], lens[i])]
    for at, (i, position) in reversed(list(enumerate(tokens))):
        alone = pool.attend(1, q[at : at + 1], [i], [position], [position + 1])
        assert torch.equal(together[at : at + 1], alone), (i, position)
        bad = torch.full_like(pool.sequences.qkv[i][:1], (torch.nan, torch.inf, -torch.inf)[position % 3])
        pool.write(bad, torch.tensor([position]), torch.tensor(pool.sequences.slots(i, position, position + 1)))
        first = at - (position - starts[i])
        rest = pool.attend(1, q[first : at + 1], [i], [starts[i]], [position + 1])
        assert torch.equal(together[first:at], rest[:-1]), (i, position)


@pytest.mark.parametrize("part", range(2))
def test_each_is_as_if_it_were_decoded_alone_whatever_comes_after_it(part: int) -> None:
    for seed in range(part, 60, 2):
        rng = random.Random(seed)
        pool, _, _ = draw_pool(rng, NATIVE, NativeAttention)
        if not pool.sequences.num_shared:
            check_alone(pool, [max(0, n - rng.randint(1, FEW)) for n in pool.sequences.lens])


def test_what_the_first_alone_sees_does_not_reach_the_others() -> None:
    """The chunks end with that token."""
    for size, dtype in zip((5, 16, 23, 530), DTYPES * 2, strict=True):
        spec = AttentionSpec(1.0, window=size)
        pool = native_pool(Sequences(Heads(1, 3, 64), 16, [2 * size + 3], dtype), spec)
        starts, ends = [2 * size - 1], pool.sequences.lens
        pool.fill(starts)
        q = pool.write_span([0], starts, ends)
        before = pool.attend(1, q, [0], starts, ends)
        pool.forget([0], [2 * size])
        after = pool.attend(1, q, [0], starts, ends)
        assert after[0].isnan().all()
        assert torch.equal(after[1:], before[1:])


@pytest.mark.parametrize("streams", [3, 40])
def test_what_is_shared_is_read_from_the_blocks_of_the_first(streams: int) -> None:
    """Once, for all: the tables of others are not looked up there."""
    lens = [1041, 1100, *[1061] * (streams - 3), 1700]
    pool = native_pool(Sequences(Heads(2, 2, 64), 16, lens, torch.bfloat16, shared=65))
    pool.fill(lens)
    metadata = pool.metadata(streams, range(streams), [n - 1 for n in lens], lens)
    q = torch.randn(streams, 4, 64).bfloat16()
    apart = pool.backend.attend(q, pool.kv, metadata, PLAIN)
    tables = metadata.block_tables.clone()
    tables[1:, :64] = 0
    at_once = replace(metadata, num_shared=1024, block_tables=tables)
    assert torch.equal(pool.backend.attend(q, pool.kv, at_once, PLAIN), apart)


# ---- tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_a_pool_of_more_than_4_giga_elements(dtype: torch.dtype) -> None:
    """The last blocks of a pool that is too large for 32 bits; its memory is taken where it is touched."""
    backend, heads = NativeAttention(16), Heads(2, 2, 32)
    sequences = Sequences(heads, 16, [40, 20], dtype)
    shape = (2, *backend.kv_shape(1, heads.num, heads.dim)[1:])
    far = (1 << 32) // (2 * 16 * heads.num * heads.dim) + 5
    try:
        memory = zeros_in_huge_pages((far + sequences.num_blocks, *shape), dtype)
    except OSError:
        pytest.skip("this machine does not lend so much memory")
    results, tables = [], sequences.tables
    for first in (0, far):
        pool = native_pool(sequences)
        pool.memory = memory[first : first + sequences.num_blocks]
        pool.k_cache, pool.v_cache = memory[:, 0], memory[:, 1]
        sequences.tables = [[first + block for block in table] for table in tables]
        pool.fill([39, 19])
        results.append((pool.memory.clone(), *(pool.step(decodes, [39, 19], [40, 20]) for decodes in (0, 2))))
    for near, distant in zip(*results, strict=True):
        assert near.any()
        assert torch.equal(near, distant)
