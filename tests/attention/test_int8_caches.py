"""Caches in 8 bits: every backend that has one attends to what it holds, bit by bit."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanoengine.core.attention import AttentionSpec
from nanoengine.kernels.kv_int8 import dequantize, quantize
from tests.attention.every_backend import both_dtypes, running
from tests.attention.int8_pools import assert_same, both_pools
from tests.attention.paged import PLAIN, Heads, Pool, Sequences

every_backend = pytest.mark.parametrize("name", ["torch", "native", "triton"])

INTERPRETED = Heads(1, 2, 32)
"""Few and small, as befits Triton's interpreter."""

SPECS = [PLAIN, AttentionSpec(1.0, window=20), AttentionSpec(1.0, window=32, sinks=True, soft_cap=3.0)]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=["plain", "window", "all"])


def rounds(name: str) -> bool:
    return name != "triton" or torch.cuda.is_available()


@every_backend
@both_dtypes
@pytest.mark.parametrize("heads", [Heads(2, 3, 32), Heads(1, 2, 128)], ids=str)
def test_whole_prompts_and_then_tokens(name: str, heads: Heads, dtype: torch.dtype) -> None:
    with running(name, heads.dim, dtype) as backend:
        lens = [1, 15, 18, 40]
        both = both_pools(backend, Sequences(heads, backend.block_size, lens, dtype))
        assert_same(*(pool.prefill([0, 0, 0, 0], [1, 13, 16, 38]) for pool in both), rounded_alike=rounds(name))
        assert_same(*(pool.decode([14, 17, 39], [1, 2, 3]) for pool in both), rounded_alike=rounds(name))
        assert_same(*(pool.decode([15, 18, 40], [1, 2, 3]) for pool in both), rounded_alike=rounds(name))


@every_backend
@both_dtypes
@every_spec
def test_a_step_of_a_few_tokens_of_each_and_chunks(name: str, spec: AttentionSpec, dtype: torch.dtype) -> None:
    heads = INTERPRETED if name == "triton" else Heads(2, 2, 64)
    with running(name, heads.dim, dtype) as backend:
        lens, starts = [17, 66, 40, 75], [16, 62, 0, 35]
        both = both_pools(backend, Sequences(heads, backend.block_size, lens, dtype), spec)
        for pool in both:
            pool.fill(starts)
        assert_same(*(pool.mixed(2, starts, lens) for pool in both), rounded_alike=rounds(name))


@every_backend
@both_dtypes
def test_a_chunk_sees_its_own_tokens_as_they_are_stored(name: str, dtype: torch.dtype) -> None:
    """So that a prompt in chunks is the same as in one."""
    with running(name, 64, dtype) as backend:
        sequences = Sequences(Heads(1, 2, 64), backend.block_size, [50], dtype)
        whole, chunks = (Pool(sequences, backend, quantized=True) for _ in range(2))
        at_once = whole.prefill([0], [50])
        in_parts = torch.cat([chunks.prefill([start], [end]) for start, end in ((0, 16), (16, 35), (35, 50))])
        torch.testing.assert_close(in_parts, at_once, rtol=2.0**-7, atol=1e-5 if dtype is torch.float32 else 2.0**-7)
        assert torch.equal(chunks.memory, whole.memory)


@every_backend
@both_dtypes
def test_what_is_normed_rotated_and_written_in_one_go_is_what_would_be_stored_otherwise(
    name: str, dtype: torch.dtype
) -> None:
    """Rounded to the dtype first, and then to 8 bits."""
    with running(name, 64, dtype) as backend:
        sequences = Sequences(Heads(2, 2, 64), backend.block_size, [21], dtype)
        in_one_go, other = Pool(sequences, backend, quantized=True), Pool(sequences, backend)
        q = [pool.write_span([0], [0], [21]) for pool in (in_one_go, other)]
        assert_same(*q)
        seen = [read_back(pool, 21) for pool in (in_one_go, other)]
        assert_same(seen[0], dequantize(*quantize(seen[1]), dtype), rounded_alike=rounds(name))


def read_back(pool: Pool, count: int) -> Tensor:
    """[count, num_kv_heads, head_dim]: V of each token of the first sequence, read by a query that sees nothing else."""
    heads, spec = pool.sequences.heads, AttentionSpec(1.0, window=1)
    pool.spec = spec
    q = torch.zeros(count, heads.num * heads.group, heads.dim, dtype=pool.dtype)
    return pool.attend(0, q, [0], [0], [count])[:, :: heads.group]


@every_backend
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("decoding", [False, True])
def test_what_is_not_finite_spoils_its_own_sequence_alone(name: str, decoding: bool, bad: float) -> None:
    with running(name, 64, torch.float32) as backend:
        sequences = Sequences(Heads(1, 2, 64), backend.block_size, [20, 20])
        fine = Pool(sequences, backend, quantized=True, norms=False, rotated=False)
        fine.fill([18, 18])
        expected = fine.mixed(2 * decoding, [18, 18], [20, 20])
        for element in (2 * 64 + 5, 3 * 64 + 60):  # of K, of V
            spoiled = Sequences(Heads(1, 2, 64), backend.block_size, [20, 20])
            spoiled.qkv[0][7, element] = bad
            pool = Pool(spoiled, backend, quantized=True, norms=False, rotated=False)
            pool.fill([18, 18])
            out = pool.mixed(2 * decoding, [18, 18], [20, 20])
            assert not out[:2].isfinite().any()
            assert torch.equal(out[2:], expected[2:])


@every_backend
@both_dtypes
@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e20])
def test_elements_of_any_size(name: str, size: float, dtype: torch.dtype) -> None:
    with running(name, 32, dtype) as backend:
        sequences = Sequences(Heads(1, 1, 32), backend.block_size, [17], dtype)
        sequences.qkv[0][:, 32:] *= size
        both = both_pools(backend, sequences)
        assert_same(*(pool.prefill([0], [17], scale=1e-30) for pool in both), rounded_alike=rounds(name))
