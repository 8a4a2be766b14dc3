"""Attention in plain torch against dense attention, in float64, over paged caches whose unwritten slots hold NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.core import torch_attention
from nanoengine.core.attention import AttentionSpec
from nanoengine.core.torch_attention import TorchAttention
from tests.core.paged_attention import (
    HEAD_DIM,
    SCALE,
    Paged,
    assert_equal,
    attention_calls,
    dense_attention,
)
from tests.drawn import FAST


@FAST
@given(st.data())
def test_a_step_is_dense_attention(data: st.DataObject) -> None:
    """Decodes and chunks with and without history, at the edges of blocks and between, in slices of any size."""
    block_size, heads = data.draw(st.sampled_from([1, 4, 16])), data.draw(st.sampled_from([(1, 1), (4, 1), (6, 2)]))
    ends = data.draw(st.lists(st.integers(1, 2 * block_size + 9), min_size=1, max_size=5))
    starts = [data.draw(st.integers(0, end - 1)) for end in ends]
    paged = Paged(ends, block_size, num_heads=heads[0], num_kv_heads=heads[1])
    paged.write([0] * len(ends), starts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_attention, "MAX_SCORES", data.draw(st.sampled_from([1, 20, 100, 1 << 24])))
        assert_equal(*paged.mixed(data.draw(st.integers(0, len(ends))), starts, ends))
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


@pytest.mark.parametrize("slots", [[14, 5, 7], [-1, -1, -1], [-1, 9, -1], [9, -1, -1]])
def test_each_token_is_written_into_its_slot_and_no_other_and_into_none_if_that_is_minus_1(slots: list[int]) -> None:
    backend = TorchAttention(4)
    k, v = torch.randn(3, 2, HEAD_DIM), torch.randn(3, 2, HEAD_DIM)
    k_cache, v_cache = torch.full((2, *backend.kv_shape(4, 2, HEAD_DIM)), float("nan"))
    backend.write_kv(k, v, k_cache, v_cache, torch.tensor(slots))
    for cache, source in ((k_cache, k), (v_cache, v)):
        written = [row for row, slot in enumerate(slots) if slot >= 0]
        assert cache.isfinite().sum() == len(written) * 2 * HEAD_DIM
        for row in written:
            assert torch.equal(cache.flatten(0, 1)[slots[row]], source[row])


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
