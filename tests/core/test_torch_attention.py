"""Attention in plain torch against dense attention, in float64, over paged caches whose unwritten slots hold NaN."""

from __future__ import annotations

import pytest
import torch

from nanoengine.core import torch_attention
from nanoengine.core.attention import AttentionSpec
from nanoengine.core.torch_attention import TorchAttention
from tests.core.paged_attention import (
    HEAD_DIM,
    SCALE,
    Paged,
    assert_equal,
    attention_calls,
    boundary_lengths,
    dense_attention,
)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_prefill_of_whole_prompts_at_every_block_boundary(block_size: int) -> None:
    for n in boundary_lengths(block_size):
        assert_equal(*Paged([n], block_size, seed=n).prefill([0], [n]))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_decode_at_every_block_boundary(block_size: int) -> None:
    for n in boundary_lengths(block_size):
        paged = Paged([n], block_size, seed=n)
        if n > 1:
            paged.write([0], [n - 1])
        assert_equal(*paged.decode([n - 1], [n]))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 1), (6, 2), (8, 2)])
def test_query_heads_share_the_right_kv_heads(heads: tuple[int, int]) -> None:
    num_heads, num_kv_heads = heads
    paged = Paged([11, 6], 4, num_heads=num_heads, num_kv_heads=num_kv_heads)
    assert_equal(*paged.prefill([0, 0], [10, 5]))
    assert_equal(*paged.decode([10, 5], [11, 6]))


def test_prefill_of_mixed_lengths_in_one_batch() -> None:
    lens = [1, 9, 4, 3, 17, 5]
    assert_equal(*Paged(lens, 4).prefill([0] * len(lens), lens))


def test_decode_of_mixed_lengths_in_one_batch() -> None:
    lens = [1, 9, 4, 3, 17, 5, 40]
    paged = Paged(lens, 4)
    paged.write([0] * len(lens), [n - 1 for n in lens])
    assert_equal(*paged.decode([n - 1 for n in lens], lens))


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 8, 13])
def test_prefill_in_chunks_sees_the_history_and_nothing_after(chunk: int) -> None:
    paged = Paged([13], 4)
    for start in range(0, 13, chunk):
        assert_equal(*paged.prefill([start], [min(start + chunk, 13)]))


def test_a_batch_of_fresh_prompts_and_later_chunks() -> None:
    paged = Paged([9, 12, 20, 6], 4)
    paged.write([0, 0, 0, 0], [0, 5, 16, 5])
    assert_equal(*paged.prefill([0, 5, 16, 5], [9, 12, 19, 6]))


def test_prefill_of_one_last_token_is_its_decode() -> None:
    prefilled, decoded = Paged([10], 4), Paged([10], 4)
    for paged in (prefilled, decoded):
        paged.write([0], [9])
    out = prefilled.prefill([9], [10])[0]
    torch.testing.assert_close(decoded.decode([9], [10])[0], out)


def test_slots_that_nobody_wrote_are_never_read() -> None:
    """The tails of last blocks, other blocks and the null block hold NaN; padding of a batch must not bring it in."""
    lens = [1, 30, 5]
    paged = Paged(lens, 16)
    out, _ = paged.prefill([0, 0, 0], [1, 29, 4])
    assert out.isfinite().all()
    out, _ = paged.decode([0, 29, 4], lens)
    assert out.isfinite().all()
    assert paged.k_cache[0].isnan().all()


def test_sequences_may_share_blocks() -> None:
    """One prefix of two blocks, three continuations of different lengths."""
    paged = Paged([9, 11, 14], 4)
    for i in (1, 2):
        paged.tables[i][:2] = paged.tables[0][:2]
        paged.k[i][:8], paged.v[i][:8] = paged.k[0][:8], paged.v[0][:8]
    paged.write([0, 8, 8], [8, 8, 8])
    assert_equal(*paged.prefill([8, 8, 8], [9, 10, 13]))
    assert_equal(*paged.decode([8, 10, 13], [9, 11, 14]))


def test_a_block_written_in_this_step_may_be_read_by_another_sequence_of_it() -> None:
    paged = Paged([9, 10], 4)
    paged.tables[1][:2] = paged.tables[0][:2]
    paged.k[1][:8], paged.v[1][:8] = paged.k[0][:8], paged.v[0][:8]
    assert_equal(*paged.prefill([0, 8], [9, 10]))


def test_write_kv_puts_each_token_into_its_slot_and_touches_no_other() -> None:
    backend = TorchAttention(4)
    k, v = torch.randn(3, 2, HEAD_DIM), torch.randn(3, 2, HEAD_DIM)
    k_cache, v_cache = torch.full((2, *backend.kv_shape(4, 2, HEAD_DIM)), float("nan"))
    backend.write_kv(k, v, k_cache, v_cache, torch.tensor([14, 5, 7]))
    for cache, source in ((k_cache, k), (v_cache, v)):
        for row, (block, offset) in enumerate([(3, 2), (1, 1), (1, 3)]):
            assert torch.equal(cache[block, offset], source[row])
        assert cache.isfinite().sum() == source.numel()


@pytest.mark.parametrize("slots", [[-1, -1, -1], [-1, 9, -1], [9, -1, -1]])
def test_slot_minus_1_is_not_written(slots: list[int]) -> None:
    backend = TorchAttention(4)
    k, v = torch.randn(3, 2, HEAD_DIM), torch.randn(3, 2, HEAD_DIM)
    k_cache, v_cache = torch.full((2, *backend.kv_shape(4, 2, HEAD_DIM)), float("nan"))
    backend.write_kv(k, v, k_cache, v_cache, torch.tensor(slots))
    for cache, source in ((k_cache, k), (v_cache, v)):
        written = [row for row, slot in enumerate(slots) if slot >= 0]
        assert cache.isfinite().sum() == len(written) * 2 * HEAD_DIM
        for row in written:
            assert torch.equal(cache[2, 1], source[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_stay_what_they_are(dtype: torch.dtype) -> None:
    paged = Paged([7, 3], 4)
    paged.k_cache, paged.v_cache = paged.k_cache.to(dtype), paged.v_cache.to(dtype)
    paged.k, paged.v = [k.to(dtype) for k in paged.k], [v.to(dtype) for v in paged.v]
    metadata = paged.metadata(0, [0, 0], [7, 3], paged.write([0, 0], [7, 3]))
    q = torch.randn(10, 4, HEAD_DIM).to(dtype)
    out = paged.backend.attend(q, paged.k_cache, paged.v_cache, metadata, AttentionSpec(SCALE))
    expected = torch.cat(
        [dense_attention(q[:7], paged.k[0], paged.v[0], 0), dense_attention(q[7:], paged.k[1], paged.v[1], 0)]
    )
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)


Shape = tuple[int, int, int]


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """(sequences, queries of each, keys of each) of every call of torch's attention."""
    return attention_calls(monkeypatch)


# ---- bounded memory


@pytest.mark.parametrize("max_scores", [1, 20, 45, 100])
@pytest.mark.parametrize("history", [[0, 0, 0], [5, 16, 1]], ids=["fresh", "later chunks"])
def test_prefill_in_slices_of_any_size_is_right(
    monkeypatch: pytest.MonkeyPatch, max_scores: int, history: list[int]
) -> None:
    monkeypatch.setattr(torch_attention, "MAX_SCORES", max_scores)
    paged = Paged([12, 23, 9], 4)
    if any(history):
        paged.write([0, 0, 0], history)
    assert_equal(*paged.prefill(history, paged.seq_lens))


@pytest.mark.parametrize("history", [0, 10])
def test_prefill_computes_a_bounded_number_of_scores_at_once(
    monkeypatch: pytest.MonkeyPatch, attended: list[Shape], history: int
) -> None:
    monkeypatch.setattr(torch_attention, "MAX_SCORES", 90)
    paged = Paged([30], 4)
    if history:
        paged.write([0], [history])
    assert_equal(*paged.prefill([history], [30]))
    assert sum(num_queries for _, num_queries, _ in attended) == 30 - history
    assert max(num_queries * seq_len for _, num_queries, seq_len in attended) <= 90
