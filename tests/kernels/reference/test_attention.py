"""The torch backend's bounds: of the memory that it takes at once, and of padding; no result depends on them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.core.attention import AttentionSpec
from nanoengine.kernels.reference import attention as torch_reference
from nanoengine.kernels.reference.attention import TorchAttention
from tests.core.paged_attention import attention_calls
from tests.kernels.attention.contract import check_step
from tests.kernels.attention.every_backend import KINDS
from tests.kernels.attention.paged import PLAIN, Heads, Pool, Sequences, assert_attended

Shape = tuple[int, int, int]
"""(sequences, queries of each, keys of each) of a call of torch's attention."""


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    return attention_calls(monkeypatch)


def check(lens: list[int], starts: list[int], num_decodes: int, spec: AttentionSpec = PLAIN) -> None:
    pool = Pool(Sequences(Heads(2, 2, 8), 16, lens), TorchAttention(16), spec=spec)
    pool.fill(starts)
    assert_attended(pool.step(num_decodes, starts, lens), pool.exact(starts, lens))


def decode(lens: list[int], spec: AttentionSpec = PLAIN) -> None:
    check(lens, [n - 1 for n in lens], len(lens), spec)


def test_no_step_depends_on_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(80):
        rng = random.Random(seed)
        monkeypatch.setattr(torch_reference, "SHORT", rng.choice([1, 8, 64]))
        monkeypatch.setattr(torch_reference, "MAX_GATHERED_TOKENS", rng.choice([1, 100, 1 << 17]))
        monkeypatch.setattr(torch_reference, "MAX_SCORES", rng.choice([1, 50, 300]))
        check_step(KINDS[0], TorchAttention, seed)


def test_decode_does_not_pad_short_sequences_to_a_long_one(attended: list[Shape]) -> None:
    decode([3500] + [100] * 20)
    assert sorted((num_seqs, seq_len) for num_seqs, _, seq_len in attended) == [(1, 3500), (20, 100)]


def test_decode_gathers_a_bounded_number_of_tokens_at_once(
    monkeypatch: pytest.MonkeyPatch, attended: list[Shape]
) -> None:
    monkeypatch.setattr(torch_reference, "MAX_GATHERED_TOKENS", 250)
    decode([100] * 7)
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


def test_what_is_gathered_follows_the_window(monkeypatch: pytest.MonkeyPatch, attended: list[Shape]) -> None:
    monkeypatch.setattr(torch_reference, "SHORT", 8)
    spec = AttentionSpec(0.3, window=20)
    decode([600, 20, 500], spec)
    assert attended
    assert all(num_keys <= 20 for _, _, num_keys in attended)
    attended.clear()
    check([200], [0], 0, spec)
    assert sum(num_queries for _, num_queries, _ in attended) == 200
    assert all(num_keys < num_queries + 20 and num_queries <= 20 for _, num_queries, num_keys in attended)
