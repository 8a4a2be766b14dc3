"""Attention in plain torch keeps the contract of backends by itself, in bounded memory."""

from __future__ import annotations

import random

import pytest
import torch

from nanoengine.core import torch_attention
from nanoengine.core.torch_attention import CausalTorchAttention
from tests.core.paged_attention import attention_calls, in_contract
from tests.kernels.attention.contract import check_step, check_write
from tests.kernels.attention.every_backend import Kind
from tests.kernels.attention.paged import Heads, Pool, Sequences, assert_attended

BACKEND = in_contract(CausalTorchAttention)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
KIND = Kind("torch", (1, 4, 16), (2, 8, 32), 90, 60_000, frozenset(), False, DTYPES)


def test_any_step_is_attention_by_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices of any size."""
    for seed in range(120):
        monkeypatch.setattr(torch_attention, "MAX_SCORES", random.Random(seed).choice([1, 20, 100, 1 << 24]))
        check_step(KIND, BACKEND, seed)


def test_any_tokens_are_written_where_they_belong_and_nowhere_else() -> None:
    for seed in range(40):
        check_write(KIND, BACKEND, seed)


@pytest.mark.parametrize("history", [0, 10])
def test_prefill_computes_a_bounded_number_of_scores_at_once(monkeypatch: pytest.MonkeyPatch, history: int) -> None:
    monkeypatch.setattr(torch_attention, "MAX_SCORES", 90)
    attended, pool = attention_calls(monkeypatch), Pool(Sequences(Heads(2, 2, 8), 4, [30]), BACKEND(4))
    pool.fill([history])
    assert_attended(pool.step(0, [history], [30]), pool.exact([history], [30]))
    assert sum(num_queries for _, num_queries, _ in attended) == 30 - history
    assert max(num_queries * seq_len for _, num_queries, seq_len in attended) <= 90
