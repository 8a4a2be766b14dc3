"""Every backend keeps the contract of attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanoengine.core.attention import AttentionSpec
from tests.drawn import check_seeds
from tests.kernels.attention.contract import check_step, check_write
from tests.kernels.attention.every_backend import KINDS, BackendOf, Kind, every_backend, running
from tests.kernels.attention.paged import Heads, Pool, Sequences

PARTS = 4
STEPS = {"native": 200, "torch": 100, "triton": 8}
"""Triton's are drawn with what they are launched with, too: `tests/kernels/triton/test_paged_attention.py`."""
WRITES = {"native": 60, "torch": 30, "triton": 16, "flash_attn": 4, "torch_flash": 2}


@every_backend
@pytest.mark.parametrize("part", range(PARTS))
def test_any_step_is_attention_by_its_definition(kind: Kind, part: int) -> None:
    with running(kind) as backend_of:
        check_seeds(lambda seed: check_step(kind, backend_of, seed), range(part, STEPS.get(kind.name, 40), PARTS))


@every_backend
def test_any_tokens_are_written_where_they_belong_and_nowhere_else(kind: Kind) -> None:
    """By Triton's kernels, too, but for torch's copy of flash-attn: it is as the package there."""
    most = 6 if kind.name in ("triton", "flash_attn") else 100
    if kind.name == "triton":  # a program writes 1,024 numbers
        kind = replace(kind, block_sizes=(16, 64, 256), head_dims=(16, 64, 256))
    with running(kind, quick=kind.name == "torch_flash") as backend_of:
        check_seeds(lambda seed: check_write(kind, backend_of, seed, most), range(WRITES[kind.name]))


def two_sequences(kind: Kind, backend_of: BackendOf, *, quantized: bool) -> Pool:
    """Of 8 tokens each, of which 3 are in the cache; nothing is normed or rotated."""
    sequences = Sequences(Heads(1, 2, 32), kind.block_sizes[-1], [8, 8])
    pool = Pool(sequences, backend_of(kind.block_sizes[-1]), norms=False, rotated=False, quantized=quantized)
    pool.fill([3, 3])
    return pool


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.quantizes], ids=lambda kind: kind.name)
@pytest.mark.parametrize("num_decodes", [0, 2])
@pytest.mark.parametrize(("quantized", "bad"), [(False, torch.nan), (True, torch.nan), (True, -torch.inf)])
def test_what_is_not_finite_shows_and_spoils_no_other_sequence(
    kind: Kind, quantized: bool, bad: float, num_decodes: int
) -> None:
    """Nor a token before it where each of a few is decoded by itself."""
    kept = 7 if num_decodes and kind.name != "triton" else 5
    with running(kind, quick=False) as backend_of:
        expected = two_sequences(kind, backend_of, quantized=quantized).step(num_decodes, [3, 3], [8, 8])
        for element in (5, 2 * 32 + 5, 3 * 32 + 30):  # of a query, of K, of V
            pool = two_sequences(kind, backend_of, quantized=quantized)
            pool.sequences.qkv[1][5, element] = bad
            out = pool.step(num_decodes, [3, 3], [8, 8])
            touched = out[7:8, :1] if element == 5 else out[7:]
            assert not touched.isfinite().all(2).any()
            torch.testing.assert_close(out[:kept], expected[:kept], rtol=1e-5, atol=1e-5)
            if element == 5:
                torch.testing.assert_close(out[8:], expected[8:], rtol=1e-5, atol=1e-5)


@every_backend
def test_steps_of_nothing(kind: Kind) -> None:
    """Decodes that are all padding, as when a step is recorded; and no tokens that would be written."""
    with running(kind) as backend_of:
        pool = two_sequences(kind, backend_of, quantized=False)
        before = pool.memory.clone()
        none = torch.zeros(0, 1, 32)
        pool.backend.write_kv(none, none, pool.kv, torch.zeros(0, dtype=torch.int64))
        assert torch.equal(pool.memory.nan_to_num(9.0), before.nan_to_num(9.0))
        metadata = pool.metadata(1, [0], [4], [5])
        metadata = replace(metadata, seq_lens=torch.zeros_like(metadata.seq_lens), seq_lens_list=[0])
        q = torch.randn(1, 2, 32)
        assert pool.backend.attend(q, pool.kv, metadata, AttentionSpec(0.2)).shape == q.shape


@every_backend
def test_all_backends_but_the_reference_offer_to_write_in_one_go(kind: Kind) -> None:
    with running(kind, quick=False) as backend_of:
        assert (backend_of(kind.block_sizes[-1]).rotate_and_write is None) == (kind.name == "torch")
