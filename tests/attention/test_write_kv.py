"""How every backend that runs here takes K and V: norms, rotation and the write in one go, or `write_kv` alone."""

from __future__ import annotations

import pytest
import torch

from tests.attention.every_backend import BLOCK_SIZES, both_dtypes, every_backend, running
from tests.attention.paged import Heads, Pool, Sequences, assert_attended, exact_pool

HEADS = Heads(2, 3, 32)


def check_layer(name: str, dtype: torch.dtype, *, norms: bool, rotated: bool, one_go: bool) -> None:
    """Chunks with history and then decodes, against the reference."""
    sequences = Sequences(HEADS, BLOCK_SIZES[name], [21, 1, 34], dtype)
    written_as_another = name == "flash_attn_3"  # by Triton's kernels, as with flash_attn_2
    with running(name, HEADS.dim, dtype, quick=written_as_another) as backend:
        pool = Pool(sequences, backend, norms=norms, rotated=rotated, one_go=one_go)
        exact = exact_pool(sequences, norms=norms, rotated=rotated)
        for starts, ends in (([0, 0, 0], [20, 1, 16]), ([20, 0, 16], [21, 1, 33])):
            assert_attended(pool.prefill(starts, ends), exact.prefill(starts, ends), starts, ends)
        assert_attended(pool.decode([21, 1, 34]), exact.decode([21, 1, 34]), [20, 0, 33], [21, 1, 34])


@every_backend
@pytest.mark.parametrize("one_go", [True, False], ids=["in one go", "one after the other"])
@pytest.mark.parametrize("norms", [True, False], ids=["norms", "no norms"])
@pytest.mark.parametrize("rotated", [True, False], ids=["rotated", "not rotated"])
def test_a_layer_with_and_without_norms_and_rotation(name: str, norms: bool, rotated: bool, one_go: bool) -> None:
    check_layer(name, torch.float32, norms=norms, rotated=rotated, one_go=one_go)


@every_backend
@pytest.mark.parametrize("one_go", [True, False], ids=["in one go", "one after the other"])
def test_the_same_in_bfloat16_without_norms_and_rotation(name: str, one_go: bool) -> None:
    check_layer(name, torch.bfloat16, norms=False, rotated=False, one_go=one_go)


@every_backend
@both_dtypes
@pytest.mark.parametrize("tokens", [1, 20])
def test_what_is_neither_normed_nor_rotated_is_copied_bit_by_bit(name: str, tokens: int, dtype: torch.dtype) -> None:
    """Both ways write the same, each token into its slot and nothing else; q is what was projected."""
    sequences = Sequences(HEADS, BLOCK_SIZES[name], [tokens], dtype)
    with running(name, HEADS.dim, dtype) as backend:
        pools = [Pool(sequences, backend, norms=False, rotated=False, one_go=one_go) for one_go in (True, False)]
        for pool in pools:
            q = pool.write_span([0], [0], [tokens])
            assert torch.equal(q.flatten(1), sequences.qkv[0][:, : q[0].numel()])
            for cache in (pool.k_cache, pool.v_cache):
                assert cache.isfinite().sum() == tokens * HEADS.num * HEADS.dim
            assert pool.memory.isfinite().sum() == 2 * tokens * HEADS.num * HEADS.dim
    assert torch.equal(pools[0].memory.nan_to_num(9.0), pools[1].memory.nan_to_num(9.0))


@every_backend
@both_dtypes
@pytest.mark.parametrize("unwritten", [[0], [2], [0, 1, 2], [1, 3]])
def test_write_kv_leaves_slot_minus_1_out(name: str, unwritten: list[int], dtype: torch.dtype) -> None:
    sequences = Sequences(HEADS, BLOCK_SIZES[name], [5], dtype)
    slots = sequences.slots(0, 0, 5)
    written = [i for i in range(5) if i not in unwritten]
    k, v = torch.randn(2, 5, HEADS.num, HEADS.dim).to(dtype)
    with running(name, HEADS.dim, dtype) as backend:
        pool, whole = Pool(sequences, backend), Pool(sequences, backend)
        some = torch.tensor([-1 if i in unwritten else slot for i, slot in enumerate(slots)])
        backend.write_kv(k, v, pool.k_cache, pool.v_cache, some)
        kept = torch.tensor([slots[i] for i in written], dtype=torch.int64)
        backend.write_kv(k[written], v[written], whole.k_cache, whole.v_cache, kept)
    assert pool.memory.isfinite().sum() == 2 * len(written) * HEADS.num * HEADS.dim
    assert torch.equal(pool.memory.nan_to_num(9.0), whole.memory.nan_to_num(9.0))


@every_backend
@both_dtypes
def test_write_kv_takes_tokens_with_gaps_between_them(name: str, dtype: torch.dtype) -> None:
    """As k and v are where they were projected together."""
    sequences = Sequences(HEADS, BLOCK_SIZES[name], [20], dtype)
    kv = torch.randn(20, 2 * HEADS.num + 1, HEADS.dim).to(dtype)
    k, v = kv[:, : HEADS.num], kv[:, HEADS.num : -1]
    slots = torch.tensor(sequences.slots(0, 0, 20))
    with running(name, HEADS.dim, dtype) as backend:
        dense, gaps = Pool(sequences, backend), Pool(sequences, backend)
        backend.write_kv(k.contiguous(), v.contiguous(), dense.k_cache, dense.v_cache, slots)
        backend.write_kv(k, v, gaps.k_cache, gaps.v_cache, slots)
    assert torch.equal(gaps.memory.nan_to_num(9.0), dense.memory.nan_to_num(9.0))


@every_backend
def test_no_tokens_are_written_nowhere(name: str) -> None:
    sequences = Sequences(HEADS, BLOCK_SIZES[name], [5])
    none = torch.zeros(0, HEADS.num, HEADS.dim)
    with running(name, HEADS.dim, torch.float32) as backend:
        pool = Pool(sequences, backend)
        backend.write_kv(none, none, pool.k_cache, pool.v_cache, torch.zeros(0, dtype=torch.int64))
    assert pool.memory.isnan().all()


def test_all_backends_but_the_reference_offer_to_do_it_in_one_go() -> None:
    offered = {}
    for name in BLOCK_SIZES:
        try:
            with running(name, 32, torch.float32) as backend:
                offered[name] = backend.rotate_and_write is not None
        except pytest.skip.Exception:
            continue
    assert not offered.pop("torch")
    assert all(offered.values())
