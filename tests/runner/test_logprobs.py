"""Log probabilities: of the tokens that stand at some positions, and of the likeliest ones there."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.runner.logprobs import compute_logprobs
from nanoengine.runner.row_rules import ROWS_AT_ONCE
from tests.runner.sampled_rows import random_logits


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 2 * ROWS_AT_ONCE + 3),
    vocab_size=st.integers(1, 30),
    most=st.integers(0, 40),
    ties=st.booleans(),
    seed=st.integers(0, 99),
)
def test_entries_are_those_of_a_softmax_in_float64(n: int, vocab_size: int, most: int, ties: bool, seed: int) -> None:
    logits = random_logits(seed, n, vocab_size)
    if ties:
        logits = logits.round()
    own = torch.randint(0, vocab_size, (n,), generator=torch.Generator().manual_seed(seed))
    counts = [i % (most + 1) for i in range(n)]
    entries = compute_logprobs(lambda part: logits[part], own, most).read(own.tolist(), counts)
    expected = logits.double().log_softmax(-1)
    for row, values, token, count, entry in zip(logits, expected, own.tolist(), counts, entries, strict=True):
        assert next(iter(entry)) == token
        assert entry[token].rank == 1 + int((row > row[token]).sum())
        assert len(entry) in {min(count, vocab_size), min(count, vocab_size) + 1}
        for other, found in entry.items():
            assert found.logprob == pytest.approx(float(values[other]), abs=1e-5)
        top = [found.logprob for found in list(entry.values())[1:]]
        assert top == sorted(top, reverse=True)
        assert sum(row[other] > row[token] for other in entry) == min(count, entry[token].rank - 1)


def test_all_of_a_vocabulary_sums_to_one_and_is_ranked() -> None:
    logits = random_logits(15, 1, 30)
    [entry] = compute_logprobs(lambda part: logits[part], torch.tensor([4]), 30).read([4], [30])
    assert entry.keys() == set(range(30))
    assert math.fsum(math.exp(found.logprob) for found in entry.values()) == pytest.approx(1.0, abs=1e-5)
    order = logits[0].argsort(descending=True).tolist()
    assert [entry[token].rank for token in order] == list(range(1, 31))


def test_a_position_without_a_token_leaves_the_others_alone() -> None:
    logits = random_logits(16, 3, 30)
    entries = compute_logprobs(lambda part: logits[part], torch.tensor([4, -2, 5]), 2).read([4, -1, 5], [2, 2, 2])
    alone = compute_logprobs(lambda part: logits[part], torch.tensor([4, 0, 5]), 2).read([4, 0, 5], [2, 2, 2])
    assert entries[::2] == alone[::2]
