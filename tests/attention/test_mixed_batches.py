"""Batches of decodes and chunks, through every backend that runs here, against the reference that is given each kind alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.attention.backend import AttentionBackend
from nanoengine.core.attention import AttentionMetadata, AttentionSpec
from tests.attention.every_backend import BLOCK_SIZES, both_dtypes, every_backend, running
from tests.attention.paged import Heads, Pool, Sequences, assert_attended, exact_pool
from tests.drawn import FAST

DECODES = 4


def batch_over(block_size: int) -> tuple[list[int], list[int]]:
    """Where runs start and end: four decodes, one of them of a fresh sequence; a fresh prompt, and chunks with history, one of
    them of a single token.
    """
    size = block_size
    lens = [2 * size + 8, size + 1, 1, size, 2 * size + 1, 3 * size, size + 4, size + 14]
    return [*(n - 1 for n in lens[:DECODES]), 0, 2 * size - 1, size + 3, size - 1], lens


def pool_of(sequences: Sequences, backend: AttentionBackend) -> Pool:
    return Pool(sequences, backend, norms=False, rotated=False)


def exact_kinds(sequences: Sequences, num_decodes: int, starts: list[int]) -> Tensor:
    """What the reference says to the decodes, and then to the chunks."""
    exact = exact_pool(sequences, norms=False, rotated=False)
    exact.fill(starts)
    rows = list(range(len(starts)))
    parts = []
    for kind, decoding in ((rows[:num_decodes], True), (rows[num_decodes:], False)):
        kind_starts, ends = [starts[i] for i in kind], [sequences.lens[i] for i in kind]
        if kind:
            parts.append(exact.decode(ends, kind) if decoding else exact.prefill(kind_starts, ends, kind))
    return torch.cat(parts)


def check(pool: Pool, num_decodes: int, starts: list[int]) -> None:
    lens = pool.sequences.lens
    pool.fill(starts)
    out, exact = pool.mixed(num_decodes, starts, lens), exact_kinds(pool.sequences, num_decodes, starts)
    if (
        pool.backend.name == "triton" and out.dtype is torch.bfloat16
    ):  # which its interpreter does not round to the nearest
        torch.testing.assert_close(out.double(), exact, rtol=2.0**-5, atol=2.0**-5)
    else:
        assert_attended(out, exact, starts, lens)


@every_backend
@both_dtypes
@pytest.mark.parametrize("heads", [Heads(2, 1, 32), Heads(1, 3, 32)], ids=str)
def test_it_is_what_the_reference_says_to_each_kind(name: str, heads: Heads, dtype: torch.dtype) -> None:
    starts, lens = batch_over(BLOCK_SIZES[name])
    with running(name, heads.dim, dtype, quick=True) as backend:
        check(pool_of(Sequences(heads, BLOCK_SIZES[name], lens, dtype), backend), DECODES, starts)


@every_backend
@pytest.mark.parametrize(("num_decodes", "count"), [(1, 2), (2, 3), (3, 4), (1, 5)])
def test_any_number_of_decodes(name: str, num_decodes: int, count: int) -> None:
    """Also where the lists of the chunks do not begin at a multiple of 16 bytes."""
    lens, starts = [18, 30, 1, 5, 16], [17, 29, 0, 2, 0]
    starts[num_decodes] = 0
    sequences = Sequences(Heads(1, 2, 32), BLOCK_SIZES[name], lens[:count])
    with running(name, 32, torch.float32, quick=True) as backend:
        check(pool_of(sequences, backend), num_decodes, starts[:count])


@every_backend
def test_it_is_what_the_backend_itself_says_to_each_kind(name: str) -> None:
    starts, lens = batch_over(BLOCK_SIZES[name])
    rows = list(range(len(lens)))
    with running(name, 32, torch.float32, quick=True) as backend:
        pool = pool_of(Sequences(Heads(2, 2, 32), BLOCK_SIZES[name], lens), backend)
        pool.fill(starts)
        q = pool.write_span(rows, starts, lens)
        mixed = pool.attend(DECODES, q, rows, starts, lens)
        decoded = pool.attend(DECODES, q[:DECODES], rows[:DECODES], starts[:DECODES], lens[:DECODES])
        prefilled = pool.attend(0, q[DECODES:], rows[DECODES:], starts[DECODES:], lens[DECODES:])
    torch.testing.assert_close(mixed, torch.cat((decoded, prefilled)), rtol=1e-5, atol=1e-5)


@every_backend
def test_a_chunk_may_read_what_another_run_of_the_step_writes(name: str) -> None:
    size = BLOCK_SIZES[name]
    sequences = Sequences(Heads(1, 2, 32), size, [size, size + 9], shared=1)
    with running(name, 32, torch.float32, quick=True) as backend:
        pool, exact = pool_of(sequences, backend), exact_pool(sequences, norms=False, rotated=False)
        starts = [size - 1, size]
        for each in (pool, exact):
            each.fill([size - 1, 0])
        out = pool.mixed(1, starts, sequences.lens)
        exact.write_span([0, 1], starts, sequences.lens)
        expected = torch.cat((exact.decode([size], [0]), exact.prefill([size], [size + 9], [1])))
    assert_attended(out, expected, starts, sequences.lens)


@every_backend
def test_padding_rows_change_nothing(name: str) -> None:
    """Of length 0, in slot -1, behind the decodes."""
    starts, lens = batch_over(BLOCK_SIZES[name])
    rows = list(range(len(lens)))
    with running(name, 32, torch.float32, quick=True) as backend:
        pool = pool_of(Sequences(Heads(2, 2, 32), BLOCK_SIZES[name], lens), backend)
        pool.fill(starts)
        q = pool.write_span(rows, starts, lens)
        before = pool.memory.clone()
        spec, metadata = AttentionSpec(0.2), pool.metadata(DECODES, rows, starts, lens)
        alone = backend.attend(q, pool.k_cache, pool.v_cache, metadata, spec)
        nowhere = torch.full((3,), -1)
        qkv = torch.randn(3, pool.sequences.qkv[0].shape[1])
        more = pool.write(qkv, torch.zeros(3, dtype=torch.int64), nowhere)
        padded_q = torch.cat((q[:DECODES], more, q[DECODES:]))
        padded = backend.attend(padded_q, pool.k_cache, pool.v_cache, with_padding(metadata, 3), spec)
    assert torch.equal(pool.memory.nan_to_num(9.0), before.nan_to_num(9.0))
    torch.testing.assert_close(torch.cat((padded[:DECODES], padded[DECODES + 3 :])), alone, rtol=1e-5, atol=1e-5)


@every_backend
def test_decodes_that_are_all_padding_end(name: str) -> None:
    """As when a step is recorded."""
    sequences = Sequences(Heads(2, 2, 32), BLOCK_SIZES[name], [5])
    with running(name, 32, torch.float32, quick=True) as backend:
        pool = pool_of(sequences, backend)
        metadata = pool.metadata(1, [0], [4], [5])
        metadata = replace(metadata, seq_lens=torch.zeros_like(metadata.seq_lens), seq_lens_list=[0])
        q = torch.randn(1, 4, 32)
        assert backend.attend(q, pool.k_cache, pool.v_cache, metadata, AttentionSpec(0.2)).shape == q.shape


def with_padding(metadata: AttentionMetadata, count: int) -> AttentionMetadata:
    """So many padding rows behind the decodes."""
    n, width = metadata.num_decodes, metadata.block_tables.shape[1]
    starts, zeros = metadata.query_start_loc, torch.zeros(count, dtype=torch.int32)
    between = starts[n] + torch.arange(count, dtype=torch.int32)
    tables = (metadata.block_tables[:n], zeros[:, None].expand(-1, width), metadata.block_tables[n:])
    return replace(
        metadata,
        num_decodes=n + count,
        query_start_loc=torch.cat((starts[:n], between, starts[n:] + count)),
        seq_lens=torch.cat((metadata.seq_lens[:n], zeros, metadata.seq_lens[n:])),
        block_tables=torch.cat(tables),
        query_lens_list=[*metadata.query_lens_list[:n], *[1] * count, *metadata.query_lens_list[n:]],
        seq_lens_list=[*metadata.seq_lens_list[:n], *[0] * count, *metadata.seq_lens_list[n:]],
    )


@pytest.mark.parametrize("name", ["torch", "native"])
@FAST
@given(
    st.lists(st.integers(1, 90), max_size=4),
    st.lists(st.tuples(st.integers(1, 90), st.floats(0, 0.99)), max_size=4),
    st.integers(0, 99),
)
def test_any_batch(name: str, decodes: list[int], chunks: list[tuple[int, float]], seed: int) -> None:
    if not decodes and not chunks:
        return
    sequences = Sequences(Heads(1, 2, 32), BLOCK_SIZES[name], [*decodes, *(n for n, _ in chunks)], seed=seed)
    with running(name, 32, torch.float32, quick=True) as backend:
        check(
            pool_of(sequences, backend),
            len(decodes),
            [*(n - 1 for n in decodes), *(int(n * part) for n, part in chunks)],
        )
