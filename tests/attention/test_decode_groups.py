"""Decodes of plain torch in groups: bounded memory, little padding, lengths from the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.attention import torch_reference
from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.core.attention import AttentionSpec
from tests.core.paged_attention import HEAD_DIM, SCALE, Paged, assert_equal, attention_calls

Shape = tuple[int, int, int]


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """(sequences, queries of each, keys of each) of every call of torch's attention."""
    return attention_calls(monkeypatch)


MIXED = [1, 3500, 2, 64, 65, 17, 700, 1, 129, 900, 1800, 30, 3499, 16]


def decode(paged: Paged) -> tuple[Tensor, Tensor]:
    before = [n - 1 for n in paged.seq_lens]
    paged.write([0] * len(before), before)
    return paged.decode(before, paged.seq_lens)


@pytest.mark.parametrize("limit", [1, 100, 4000, 1 << 17])
def test_decode_of_very_mixed_lengths_is_right_in_groups_of_any_size(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(torch_reference, "MAX_GATHERED_TOKENS", limit)
    assert_equal(*decode(Paged(MIXED, 16, backend=TorchAttention)))


def test_decode_does_not_pad_short_sequences_to_a_long_one(attended: list[Shape]) -> None:
    assert_equal(*decode(Paged([3500] + [100] * 20, 16, backend=TorchAttention)))
    assert sorted((num_seqs, seq_len) for num_seqs, _, seq_len in attended) == [(1, 3500), (20, 100)]


def test_decode_gathers_a_bounded_number_of_tokens_at_once(
    monkeypatch: pytest.MonkeyPatch, attended: list[Shape]
) -> None:
    monkeypatch.setattr(torch_reference, "MAX_GATHERED_TOKENS", 250)
    assert_equal(*decode(Paged([100] * 7, 16, backend=TorchAttention)))
    assert [(num_seqs, seq_len) for num_seqs, _, seq_len in attended] == [(2, 100)] * 3 + [(1, 100)]


@given(
    st.lists(st.integers(1, 5000), max_size=30),
    st.sampled_from([1, 64, 1000, 20_000, torch_reference.MAX_GATHERED_TOKENS]),
)
def test_groups_hold_every_sequence_once_within_both_bounds(counts: list[int], limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_reference, "MAX_GATHERED_TOKENS", limit)
        groups = list(torch_reference._groups(counts))
    assert sorted(i for group in groups for i in group) == list(range(len(counts)))
    for group in groups:
        longest = counts[group[-1]]
        assert longest == max(counts[i] for i in group)
        assert len(group) * longest <= limit or len(group) == 1
        assert longest <= max(2 * min(counts[i] for i in group), torch_reference.SHORT)


def test_the_host_may_know_upper_bounds_alone() -> None:
    """Lengths on the device are what counts."""
    paged = Paged([40, 33, 5], 4, backend=TorchAttention)
    paged.write([0, 0, 0], [39, 32, 4])
    metadata = paged.metadata(3, [39, 32, 4], [40, 33, 5], paged.write([39, 32, 4], [40, 33, 5]))
    q = torch.randn(3, 4, HEAD_DIM)
    exact = paged.backend.attend(q, paged.k_cache, paged.v_cache, metadata, AttentionSpec(SCALE))
    bounded = replace(metadata, seq_lens_list=[53, 46, 18], block_tables=F.pad(metadata.block_tables, (0, 5)))
    out = paged.backend.attend(q, paged.k_cache, paged.v_cache, bounded, AttentionSpec(SCALE))
    torch.testing.assert_close(out, exact)


def test_a_padding_row_changes_no_other() -> None:
    paged = Paged([10, 3], 4, backend=TorchAttention)
    paged.write([0, 0], [9, 2])
    metadata = paged.metadata(2, [9, 2], [10, 3], paged.write([9, 2], [10, 3]))
    q = torch.randn(3, 4, HEAD_DIM)
    alone = paged.backend.attend(q[:2], paged.k_cache, paged.v_cache, metadata, AttentionSpec(SCALE))
    padded = replace(
        metadata,
        num_decodes=3,
        query_start_loc=torch.arange(4, dtype=torch.int32),
        seq_lens=F.pad(metadata.seq_lens, (0, 1)),
        block_tables=F.pad(metadata.block_tables, (0, 0, 0, 1)),
        query_lens_list=[1, 1, 1],
        seq_lens_list=[10, 3, 0],
    )
    out = paged.backend.attend(q, paged.k_cache, paged.v_cache, padded, AttentionSpec(SCALE))
    torch.testing.assert_close(out[:2], alone)
