"""The native backend against the reference, given the same tokens: every shape at which its kernels cut their work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.attention.native import NativeAttention
from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.core.attention import AttentionSpec
from nanoengine.kernels.memory import zeros_in_huge_pages
from nanoengine.kernels.native_operations import unsupported_reason
from tests.attention.paged import PLAIN, THETA, Exact, Heads, Pool, Sequences, assert_attended, exact_pool, first_seen
from tests.drawn import FAST
from tests.kernels.formulas import DTYPES, assert_close, strided
from tests.support import angles_at

CPU = torch.device("cpu")
REASON = unsupported_reason(CPU, torch.float32)
needs_kernels = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])

SINKS = AttentionSpec(1.0, sinks=True)

EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1100]
"""Lengths around the tiles, chunks and parts that the kernels cut sequences into."""


def native_pool(sequences: Sequences, spec: AttentionSpec = PLAIN, *, quantized: bool = False) -> Pool:
    return Pool(sequences, NativeAttention(sequences.block_size), spec=spec, quantized=quantized)


def both(sequences: Sequences, spec: AttentionSpec = PLAIN) -> tuple[Pool, Pool]:
    return native_pool(sequences, spec), exact_pool(sequences, spec=spec)


def check_prefill(sequences: Sequences) -> None:
    """All sequences at once, from their first token to their last."""
    starts, ends = [0] * len(sequences.lens), sequences.lens
    native, exact = (pool.prefill(starts, ends) for pool in both(sequences))
    assert_attended(native, exact, starts, ends)


def check_chunks(sequences: Sequences, cuts: list[list[int]], spec: AttentionSpec = PLAIN) -> None:
    """Prefill step by step: in step j, sequence i goes from cuts[j][i] to cuts[j + 1][i], or rests."""
    native, exact = both(sequences, spec)
    for before, after in zip([[0] * len(sequences.lens), *cuts], [*cuts, sequences.lens], strict=True):
        rows = [i for i in range(len(before)) if before[i] < after[i]]
        if rows:
            starts, ends = [before[i] for i in rows], [after[i] for i in rows]
            assert_attended(native.prefill(starts, ends, rows), exact.prefill(starts, ends, rows), starts, ends, spec)


def check_decode(sequences: Sequences, scale: float | None = None, spec: AttentionSpec = PLAIN) -> None:
    """The last token of each sequence, in one batch."""
    native, exact = both(sequences, spec)
    for pool in (native, exact):
        pool.fill()
    starts = [n - 1 for n in sequences.lens]
    results = [pool.decode(sequences.lens, scale=scale) for pool in (native, exact)]
    assert_attended(*results, starts, sequences.lens, spec)


# ---- shapes


@needs_kernels
@both_dtypes
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 160, 224, 256])
def test_prefill_with_heads_of_every_shape(dim: int, dtype: torch.dtype) -> None:
    for group in (1, 2, 3, 4, 5, 8):
        check_prefill(Sequences(Heads(2, group, dim), 16, [1, 17, 37], dtype, seed=group))


@needs_kernels
@both_dtypes
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 160, 224, 256])
def test_decode_with_heads_of_every_shape(dim: int, dtype: torch.dtype) -> None:
    for group in (1, 2, 3, 4, 5, 8):
        check_decode(Sequences(Heads(2, group, dim), 16, [1, 17, 38], dtype, seed=group))


@needs_kernels
@both_dtypes
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 256])
def test_prefill_at_every_edge(block_size: int, dtype: torch.dtype) -> None:
    lens = sorted({*EDGES, block_size - 1, block_size, block_size + 1})
    check_prefill(Sequences(Heads(1, 2, 32), block_size, lens, dtype))


@needs_kernels
@both_dtypes
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 256])
def test_decode_at_every_edge(block_size: int, dtype: torch.dtype) -> None:
    lens = sorted({*EDGES, block_size - 1, block_size, block_size + 1})
    check_decode(Sequences(Heads(2, 3, 64), block_size, lens, dtype))


@needs_kernels
@both_dtypes
def test_more_query_heads_to_a_kv_head_than_queries_in_a_piece_of_work(dtype: torch.dtype) -> None:
    for group in (48, 100):
        sequences = Sequences(Heads(1, group, 32), 16, [5, 20], dtype)
        check_prefill(sequences)
        check_decode(sequences)


@needs_kernels
@both_dtypes
def test_prefill_in_chunks(dtype: torch.dtype) -> None:
    lens = [600, 300, 17, 40]
    check_chunks(
        Sequences(Heads(2, 2, 64), 16, lens, dtype), [[256, 255, 16, 1], [257, 255, 17, 2], [512, 299, 17, 39]]
    )


@needs_kernels
@both_dtypes
def test_a_batch_of_fresh_prompts_and_later_chunks(dtype: torch.dtype) -> None:
    check_chunks(Sequences(Heads(2, 2, 64), 16, [9, 530, 20, 6], dtype), [[0, 500, 16, 5]])


@needs_kernels
@both_dtypes
def test_sequences_may_share_blocks_that_one_of_them_wrote(dtype: torch.dtype) -> None:
    """A prefix of 3 blocks, written by the first sequence in the same step as the others read it."""
    sequences = Sequences(Heads(2, 2, 32), 16, [60, 70, 49], dtype, shared=3)
    native, exact = both(sequences)
    starts, ends = [0, 48, 48], [59, 69, 49]
    assert_attended(native.prefill(starts, ends), exact.prefill(starts, ends), starts, ends)
    assert_attended(native.decode([60, 70], [0, 1]), exact.decode([60, 70], [0, 1]), [59, 69], [60, 70])


shapes = st.builds(Heads, st.integers(1, 3), st.integers(1, 9), st.sampled_from([32, 64, 96, 128, 192, 256]))


@st.composite
def sequences_in_steps(draw: st.DrawFn) -> tuple[Sequences, list[list[int]]]:
    heads = draw(shapes)
    longest = max(40, 40_000 // (heads.num * heads.group * heads.dim))
    lens = draw(st.lists(st.integers(1, longest), min_size=1, max_size=5))
    dtype = draw(st.sampled_from(DTYPES))
    sequences = Sequences(heads, 16 * draw(st.integers(1, 5)), lens, dtype, seed=draw(st.integers(0, 99)))
    steps = draw(st.integers(0, 3))
    columns = [sorted(draw(st.lists(st.integers(0, n), min_size=steps, max_size=steps))) for n in lens]
    return sequences, [[column[j] for column in columns] for j in range(steps)]


@needs_kernels
@FAST
@given(sequences_in_steps())
def test_prefill_of_any_batch_in_any_chunks(case: tuple[Sequences, list[list[int]]]) -> None:
    check_chunks(*case)


@needs_kernels
@FAST
@given(sequences_in_steps())
def test_decode_of_any_batch(case: tuple[Sequences, list[list[int]]]) -> None:
    check_decode(case[0])


# ---- windows, sinks and soft caps: what is out of sight is NaN


@needs_kernels
@both_dtypes
@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 48, 255, 256, 257, 511, 512, 513, 2000])
def test_windows_around_every_edge(size: int, dtype: torch.dtype) -> None:
    spec = AttentionSpec(1.0, window=size)
    lens = sorted({1, 16, 33, size, size + 1, size + 17, min(2 * size + 1, 600), 1100})
    check_decode(Sequences(Heads(1, 2, 64), 32, lens, dtype), spec=spec)
    check_chunks(Sequences(Heads(1, 2, 64), 32, lens, dtype), [[n // 2 + n % 5 // 2 for n in lens]], spec)


sizes = st.one_of(st.none(), st.integers(1, 600))
any_spec = st.builds(AttentionSpec, st.just(1.0), sizes, st.booleans(), st.sampled_from([None, 0.3, 2.0, 50.0]))


@needs_kernels
@FAST
@given(sequences_in_steps(), any_spec)
def test_any_attention_of_any_batch(case: tuple[Sequences, list[list[int]]], spec: AttentionSpec) -> None:
    check_chunks(*case, spec)
    check_decode(case[0], spec=spec)


@needs_kernels
@pytest.mark.parametrize("decoding", [False, True])
def test_sinks_far_above_and_far_below_the_scores(decoding: bool) -> None:
    pool, without = (native_pool(Sequences(Heads(2, 2, 32), 16, [600]), spec) for spec in (SINKS, PLAIN))
    pool.sinks = torch.tensor([1e4, -1e4, 0.0, -1e30])
    pool.fill(), without.fill()
    out, plain = (pool.mixed(int(decoding), [599], [600]) for pool in (pool, without))
    assert not out[:, 0].any()
    assert torch.equal(out[:, [1, 3]], plain[:, [1, 3]])
    assert not torch.equal(out[:, 2], plain[:, 2])


@needs_kernels
@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_soft_cap_is_exact_for_small_scores_and_large_ones(scale: float, decoding: bool) -> None:
    """V tells the tokens apart, so that every weight counts."""
    sequences = Sequences(Heads(1, 2, 32), 16, [40])
    for soft_cap in (0.5, 30.0):
        native, exact = both(sequences, AttentionSpec(1.0, soft_cap=soft_cap))
        for pool in (native, exact):
            pool.fill()
        results = [pool.mixed(int(decoding), [39], [40], scale=scale) for pool in (native, exact)]
        torch.testing.assert_close(results[0].double(), results[1], rtol=2e-5, atol=2e-5)


@needs_kernels
@pytest.mark.parametrize("decoding", [False, True])
def test_entries_before_what_is_seen_are_not_looked_up(decoding: bool) -> None:
    """They may be the numbers of no block at all."""
    sequences = Sequences(Heads(1, 2, 32), 16, [200])
    pool = native_pool(sequences, AttentionSpec(1.0, window=20))
    pool.fill([200])
    metadata = pool.metadata(int(decoding), [0], [199], [200])
    seen = first_seen(199, pool.spec) // 16
    metadata.block_tables[:, :seen] = 1 << 30
    q = torch.randn(1, 2, 32)
    out = pool.backend.attend(q, pool.k_cache, pool.v_cache, metadata, pool.spec)
    assert out.isfinite().all()
    assert torch.equal(out, pool.attend(int(decoding), q, [0], [199], [200], scale=1.0))


@needs_kernels
@pytest.mark.parametrize("decoding", [False, True])
@both_dtypes
def test_it_is_near_the_torch_backend_in_the_same_dtype(dtype: torch.dtype, decoding: bool) -> None:
    sequences = Sequences(Heads(2, 2, 64), 32, [1, 70, 300], dtype)
    pools = native_pool(sequences), Pool(sequences, TorchAttention(32))
    if not decoding:
        native, torchs = (pool.prefill([0, 0, 0], sequences.lens) for pool in pools)
    else:
        for pool in pools:
            pool.fill()
        native, torchs = (pool.decode(sequences.lens) for pool in pools)
    assert native.dtype == torchs.dtype == dtype
    tolerance = 1e-5 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(native, torchs, rtol=tolerance, atol=tolerance)


# ---- numbers


@needs_kernels
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_scores_far_apart(scale: float) -> None:
    """Most weights are 0, the highest score moves from chunk to chunk and from part to part, and 0.0 is a score too."""
    sequences = Sequences(Heads(2, 3, 64), 16, [700, 1100, 40, 1])
    pools = both(sequences)
    native, exact = (pool.prefill([0] * 4, sequences.lens, scale=scale) for pool in pools)
    torch.testing.assert_close(native.double(), exact, rtol=1e-4 * scale, atol=1e-4 * scale)
    native, exact = (pool.decode(sequences.lens, scale=scale) for pool in pools)
    torch.testing.assert_close(native.double(), exact, rtol=1e-4 * scale, atol=1e-4 * scale)


@needs_kernels
@both_dtypes
def test_all_tokens_weigh_the_same_where_all_scores_are_equal(dtype: torch.dtype) -> None:
    sequences = Sequences(Heads(1, 2, 32), 16, [530], dtype)
    native = native_pool(sequences)
    native.fill()
    out = native.decode([530], scale=0.0)
    mean = sequences.qkv[0][:, -32:].double().mean(0)
    torch.testing.assert_close(out[0].double(), mean.expand(2, -1), rtol=1e-2, atol=1e-4)


@needs_kernels
@both_dtypes
def test_one_token_attends_to_itself(dtype: torch.dtype) -> None:
    sequences = Sequences(Heads(2, 2, 64), 16, [1], dtype)
    values = sequences.qkv[0][:, -128:].view(1, 2, 1, 64).expand(-1, -1, 2, -1).flatten(1, 2)
    pool = native_pool(sequences)
    assert torch.equal(pool.prefill([0], [1]), values)
    assert torch.equal(pool.decode([1]), values)


@needs_kernels
@both_dtypes
@pytest.mark.parametrize("decoding", [False, True])
def test_a_sequence_of_nan_shows_it_and_spoils_no_other(decoding: bool, dtype: torch.dtype) -> None:
    sequences = Sequences(Heads(2, 2, 64), 16, [40, 33, 21], dtype)
    sequences.qkv[1][7] = float("nan")
    pool = native_pool(sequences)
    if not decoding:
        pieces = pool.prefill([0, 0, 0], sequences.lens).split(sequences.lens)
    else:
        pool.fill()
        pieces = pool.decode(sequences.lens).split(1)
    assert pieces[0].isfinite().all()
    assert pieces[1][-1].isnan().all()
    assert pieces[2].isfinite().all()


# ---- writing


def written_queries(pool: Pool, slots: list[int]) -> Tensor:
    """Write the first tokens of the first sequence into these slots."""
    count = len(slots)
    return pool.write(pool.sequences.qkv[0][:count].to(pool.dtype), torch.arange(count), torch.tensor(slots))


@needs_kernels
@both_dtypes
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 100])
def test_queries_are_normed_rotated_and_rounded_once(tokens: int, dim: int, dtype: torch.dtype) -> None:
    sequences = Sequences(Heads(2, 3, dim), 16, [tokens], dtype)
    native = native_pool(sequences).write_span([0], [0], [tokens])
    exact = Pool(sequences, Exact(16, torch.float64), torch.float64).write_span([0], [0], [tokens])
    assert native.shape == (tokens, 6, dim)
    assert native.dtype == dtype
    pair = exact.abs() + exact.abs().roll(dim // 2, -1)
    assert_close(native, exact, pair)


@needs_kernels
@both_dtypes
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_each_token_is_written_into_its_slot_and_nothing_else_is(tokens: int, dtype: torch.dtype) -> None:
    sequences = Sequences(Heads(2, 2, 64), 32, [tokens], dtype)
    pool = native_pool(sequences)
    pool.fill([tokens])
    assert pool.k_cache.isfinite().sum() == tokens * 2 * 64
    assert pool.v_cache.isfinite().sum() == tokens * 2 * 64
    assert pool.memory.isfinite().sum() == 2 * tokens * 2 * 64


@needs_kernels
@both_dtypes
@pytest.mark.parametrize("unwritten", [[0], [2], [0, 1], [0, 1, 2], list(range(70)), [5, 6, 68], list(range(1, 70, 2))])
def test_slot_minus_1_is_not_written(unwritten: list[int], dtype: torch.dtype) -> None:
    """Its query is still computed, whatever it is good for."""
    tokens = max(3, unwritten[-1] + 1)
    sequences = Sequences(Heads(2, 2, 32), 16, [tokens], dtype)
    slots = sequences.slots(0, 0, tokens)
    whole, pool = native_pool(sequences), native_pool(sequences)
    q = written_queries(whole, slots)
    assert torch.equal(written_queries(pool, [-1 if i in unwritten else slot for i, slot in enumerate(slots)]), q)
    for cache in (pool.k_cache, pool.v_cache):
        assert cache.isfinite().sum() == (tokens - len(unwritten)) * 2 * 32
    still_missing = [i for i in range(tokens) if i in unwritten]
    qkv = sequences.qkv[0][still_missing]
    pool.write(qkv, torch.tensor(still_missing), torch.tensor([slots[i] for i in still_missing]))
    assert torch.equal(pool.memory.nan_to_num(9.0), whole.memory.nan_to_num(9.0))


@needs_kernels
@both_dtypes
def test_a_token_is_written_the_same_alone_and_among_others(dtype: torch.dtype) -> None:
    sequences = Sequences(Heads(2, 2, 64), 16, [100], dtype)
    at_once, one_by_one = native_pool(sequences), native_pool(sequences)
    q = at_once.write_span([0], [0], [100])
    assert torch.equal(torch.cat([one_by_one.write_span([0], [i], [i + 1]) for i in range(100)]), q)
    assert torch.equal(one_by_one.memory.nan_to_num(9.0), at_once.memory.nan_to_num(9.0))


@needs_kernels
@both_dtypes
@pytest.mark.parametrize("tokens", [63, 64, 100])
def test_k_and_v_alone_are_written_as_they_are(tokens: int, dtype: torch.dtype) -> None:
    """With numbers between the tokens, and with numbers between the heads."""
    sequences = Sequences(Heads(2, 1, 64), 16, [tokens], dtype)
    expected = Pool(sequences, NativeAttention(16), norms=False, rotated=False)
    expected.fill([tokens])
    _, k, v = sequences.qkv[0].view(tokens, 3, 2, 64).unbind(1)
    slots = torch.tensor(sequences.slots(0, 0, tokens))
    for wide in (k, k.contiguous(), strided(k), k.transpose(0, 1).contiguous().transpose(0, 1)):
        pool = native_pool(sequences)
        pool.backend.write_kv(wide, v, pool.k_cache, pool.v_cache, strided(slots))
        assert torch.equal(pool.memory.nan_to_num(9.0), expected.memory.nan_to_num(9.0))


@needs_kernels
def test_a_slot_is_written_anew() -> None:
    sequences = Sequences(Heads(1, 1, 32), 16, [20])
    used, fresh = native_pool(sequences), native_pool(sequences)
    for pool in (used, fresh):
        pool.fill([20])
    used.write(sequences.qkv[0].flip(0), torch.arange(20), torch.tensor(sequences.slots(0, 0, 20)))
    used.fill([20])
    assert torch.equal(used.memory.nan_to_num(9.0), fresh.memory.nan_to_num(9.0))


@needs_kernels
@both_dtypes
def test_a_pool_of_more_than_4_giga_elements(dtype: torch.dtype) -> None:
    """The last blocks of a pool that is too large for 32 bits; its memory is taken where it is touched."""
    backend, heads = NativeAttention(16), Heads(2, 2, 32)
    sequences = Sequences(heads, 16, [40, 20], dtype)
    shape = (2, *backend.kv_shape(1, heads.num, heads.dim)[1:])
    block = 2 * 16 * heads.num * heads.dim
    far = (1 << 32) // block + 5
    try:
        pool = zeros_in_huge_pages((far + sequences.num_blocks, *shape), dtype)
    except OSError:
        pytest.skip("this machine does not lend so much memory")
    results = []
    for first in (0, far):
        native = native_pool(sequences)
        native.memory = pool[first : first + sequences.num_blocks]
        native.k_cache, native.v_cache = pool[:, 0], pool[:, 1]
        tables = sequences.tables
        sequences.tables = [[first + block for block in table] for table in tables]
        native.fill([39, 19])
        results.append((native.memory.clone(), native.prefill([30, 0], [40, 20]), native.decode([40, 20])))
        sequences.tables = tables
    for near, distant in zip(*results, strict=True):
        assert near.any()
        assert torch.equal(near, distant)


# ---- a few new tokens per sequence: each as if it were decoded alone


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
        spoil(pool, i, position)
        first = at - (position - starts[i])
        rest = pool.attend(1, q[first : at + 1], [i], [starts[i]], [position + 1])
        assert torch.equal(together[first:at], rest[:-1]), (i, position)


def spoil(pool: Pool, row: int, position: int) -> None:
    """What a token has written becomes NaN or infinite."""
    slot = pool.sequences.slots(row, position, position + 1)
    qkv = torch.full_like(
        pool.sequences.qkv[row][:1], (torch.nan, torch.inf, -torch.inf)[position % 3], dtype=pool.dtype
    )
    pool.write(qkv, torch.tensor([position]), torch.tensor(slot))


@needs_kernels
@both_dtypes
@pytest.mark.parametrize("heads", [Heads(2, 2, 64), Heads(1, 3, 32), Heads(1, 1, 96), Heads(1, 9, 256)], ids=str)
@pytest.mark.parametrize("spec", [PLAIN, AttentionSpec(1.0, sinks=True, soft_cap=3.0)], ids=["plain", "changed"])
def test_each_of_a_few_tokens_is_the_same_as_if_it_were_decoded_alone(
    spec: AttentionSpec, heads: Heads, dtype: torch.dtype
) -> None:
    """Within a tile, across tiles, across parts, and from the first token on."""
    lens = [8, 17, 40, 520, 1026, 300, 1]
    check_alone(native_pool(Sequences(heads, 16, lens, dtype), spec), [0, 0, 37, 503, 1022, 299, 0])


@needs_kernels
@both_dtypes
@pytest.mark.parametrize("size", [1, 3, 16, 17, 50, 512, 530])
def test_each_of_a_few_tokens_begins_with_the_tile_of_its_own_first(size: int, dtype: torch.dtype) -> None:
    spec = AttentionSpec(1.0, window=size)
    lens = [9, size + 5, 3 * size + 9, 600, 1070]
    check_alone(
        native_pool(Sequences(Heads(1, 3, 64), 16, lens, dtype), spec), [max(0, n - 9 - i) for i, n in enumerate(lens)]
    )


@needs_kernels
@both_dtypes
def test_what_the_first_of_a_few_tokens_alone_sees_does_not_reach_the_others(dtype: torch.dtype) -> None:
    """The chunks end with that token."""
    for size in (5, 16, 23, 530):
        pool = native_pool(Sequences(Heads(1, 3, 64), 16, [2 * size + 3], dtype), AttentionSpec(1.0, window=size))
        starts, ends = [2 * size - 1], pool.sequences.lens
        pool.fill(starts)
        q = pool.write_span([0], starts, ends)
        before = pool.attend(1, q, [0], starts, ends)
        pool.forget([0], [2 * size])
        after = pool.attend(1, q, [0], starts, ends)
        assert after[0].isnan().all()
        assert torch.equal(after[1:], before[1:])


@needs_kernels
@FAST
@given(sequences_in_steps(), any_spec, st.lists(st.integers(1, 17), min_size=5, max_size=5))
def test_any_tokens_are_the_same_as_if_each_were_decoded_alone(
    case: tuple[Sequences, list[list[int]]], spec: AttentionSpec, counts: list[int]
) -> None:
    sequences = case[0]
    starts = [max(0, n - count) for n, count in zip(sequences.lens, counts, strict=False)]
    check_alone(native_pool(sequences, spec), starts)


# ---- what sequences share is read once


def decode_shared(
    pool: Pool, num_shared: int, *, counts: list[int] | None = None, tables_of_others: bool = True
) -> Tensor:
    """The last tokens of all sequences, so many of each or one, whose first are in the same blocks; then it need not be told to
    others than the first where."""
    lens = pool.sequences.lens
    starts = [n - count for n, count in zip(lens, counts or [1] * len(lens), strict=True)]
    metadata = pool.metadata(len(lens), range(len(lens)), starts, lens)
    if not tables_of_others:
        metadata.block_tables[1:, : num_shared // pool.sequences.block_size] = 0
    assert metadata.decodes is not None
    metadata.decodes.num_shared = num_shared
    heads = pool.sequences.heads
    shape = sum(metadata.query_lens_list), heads.num * heads.group, heads.dim
    q = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return pool.backend.attend(q.to(pool.dtype), pool.k_cache, pool.v_cache, metadata, pool.spec, pool.sinks)


def sharing_pool(
    heads: Heads, lens: list[int], dtype: torch.dtype, spec: AttentionSpec = PLAIN, *, quantized: bool = False
) -> Pool:
    """The first 1,040 tokens of all sequences are the same."""
    pool = native_pool(Sequences(heads, 16, lens, dtype, shared=65), spec, quantized=quantized)
    pool.write_span([0], [0], [lens[0]])
    for i in range(1, len(lens)):
        pool.write_span([i], [1040], [lens[i]])
    return pool


@needs_kernels
@pytest.mark.parametrize("streams", [3, 40])
def test_what_is_shared_is_read_from_the_blocks_of_the_first(streams: int) -> None:
    pool = sharing_pool(Heads(2, 2, 64), [1041, 1100, *[1061] * (streams - 3), 1700], torch.bfloat16)
    assert torch.equal(decode_shared(pool, 1024, tables_of_others=False), decode_shared(pool, 0))


@needs_kernels
def test_with_a_window_everyone_reads_what_it_sees() -> None:
    pool = sharing_pool(Heads(2, 2, 64), [1041, 1100, 1700], torch.float32, AttentionSpec(1.0, window=700))
    assert torch.equal(decode_shared(pool, 1040), decode_shared(pool, 0))


# ---- the same of a cache in 8 bits


@needs_kernels
@both_dtypes
@pytest.mark.parametrize(
    "spec", [PLAIN, AttentionSpec(1.0, window=17, sinks=True), AttentionSpec(1.0, window=530)], ids=str
)
def test_in_8_bits_each_of_a_few_tokens_is_as_if_it_were_decoded_alone(spec: AttentionSpec, dtype: torch.dtype) -> None:
    lens = [8, 17, 40, 520, 1070]
    pool = native_pool(Sequences(Heads(1, 9, 64), 16, lens, dtype), spec, quantized=True)
    check_alone(pool, [0, 0, 37, 503, 1055])


# ---- tensors that are not in one piece


@needs_kernels
@both_dtypes
def test_projections_with_gaps_between_them(dtype: torch.dtype) -> None:
    sequences = Sequences(Heads(1, 1, 32), 16, [2], dtype)
    dense, gaps = native_pool(sequences), native_pool(sequences)
    positions, slots = torch.arange(2), torch.tensor(sequences.slots(0, 0, 2))
    q = dense.write(sequences.qkv[0], positions, slots)
    assert torch.equal(gaps.write(strided(sequences.qkv[0]), positions, slots), q)
    assert torch.equal(gaps.memory.nan_to_num(9.0), dense.memory.nan_to_num(9.0))


@needs_kernels
@pytest.mark.parametrize("decoding", [False, True])
def test_queries_with_gaps_between_them(decoding: bool) -> None:
    sequences = Sequences(Heads(2, 2, 32), 16, [20, 40])
    pool = native_pool(sequences)
    pool.fill([20, 40])
    starts, ends = [19, 39], [20, 40]
    q = torch.randn(2, 4, 32)
    dense = pool.attend(2 * decoding, q, [0, 1], starts, ends)
    assert torch.equal(pool.attend(2 * decoding, strided(q), [0, 1], starts, ends), dense)
    assert torch.equal(
        pool.attend(2 * decoding, q.transpose(0, 1).contiguous().transpose(0, 1), [0, 1], starts, ends), dense
    )


@needs_kernels
@pytest.mark.parametrize("decoding", [False, True])
def test_block_tables_that_are_a_window_onto_wider_ones(decoding: bool) -> None:
    sequences = Sequences(Heads(2, 2, 32), 16, [20, 40])
    pool = native_pool(sequences)
    pool.fill([20, 40])
    metadata = pool.metadata(2 * decoding, [0, 1], [19, 39], [20, 40])
    q = torch.randn(2, 4, 32)
    dense = pool.backend.attend(q, pool.k_cache, pool.v_cache, metadata, AttentionSpec(0.2))
    wide = torch.zeros(2, 8, dtype=torch.int32)
    wide[:, :3] = metadata.block_tables
    window = replace(metadata, block_tables=wide[:, :3])
    assert torch.equal(pool.backend.attend(q, pool.k_cache, pool.v_cache, window, AttentionSpec(0.2)), dense)


@needs_kernels
def test_slots_and_angles_with_gaps_between_them() -> None:
    sequences = Sequences(Heads(1, 2, 32), 16, [5])
    dense, gaps = native_pool(sequences), native_pool(sequences)
    qkv, slots = sequences.qkv[0], torch.tensor(sequences.slots(0, 0, 5))
    q = dense.write(qkv, torch.arange(5), slots)
    cos, sin = angles_at(torch.arange(5), 32, THETA)
    result = gaps.layer.write(qkv, (strided(cos), strided(sin)), gaps.k_cache, gaps.v_cache, strided(slots))
    assert torch.equal(result, q)
    assert torch.equal(gaps.memory.nan_to_num(9.0), dense.memory.nan_to_num(9.0))


# ---- where it can run


@needs_kernels
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@both_dtypes
def test_it_runs_on_a_cpu_with_a_compiler(dim: int, dtype: torch.dtype) -> None:
    assert NativeAttention.unsupported_reason(CPU, dtype, dim, 16) is None


@needs_kernels
def test_the_shape_of_its_cache_has_blocks_first_and_room_for_every_token() -> None:
    shape = NativeAttention(32).kv_shape(7, 3, 64)
    assert shape[0] == 7
    assert torch.Size(shape).numel() == 7 * 32 * 3 * 64


@pytest.mark.parametrize("block_size", [1, 3, 8, 17, 40])
def test_unsupported_reason_with_other_blocks(block_size: int) -> None:
    reason = NativeAttention.unsupported_reason(CPU, torch.float32, 64, block_size)
    assert reason is not None
    assert f"block_size {block_size}" in reason
    assert "16" in reason


@pytest.mark.parametrize("dim", [4, 16, 48, 80, 288, 512])
def test_unsupported_reason_with_other_heads(dim: int) -> None:
    reason = NativeAttention.unsupported_reason(CPU, torch.float32, dim, 16)
    assert reason is not None
    assert f"head_dim {dim}" in reason
    assert "32" in reason
    assert "256" in reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_unsupported_reason_in_other_dtypes(dtype: torch.dtype) -> None:
    reason = NativeAttention.unsupported_reason(CPU, dtype, 64, 16)
    assert reason is not None
    assert str(dtype).removeprefix("torch.") in reason


def test_unsupported_reason_on_a_gpu() -> None:
    reason = NativeAttention.unsupported_reason(torch.device("cuda"), torch.bfloat16, 64, 16)
    assert reason is not None
    assert "cuda" in reason
