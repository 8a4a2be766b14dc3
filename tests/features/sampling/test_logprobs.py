"""Log probabilities: the model's own, of the tokens that stand at some positions, and of the likeliest ones there."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.core.messages import NONE_LEFT, UNKNOWN
from nanoengine.core.sampler import LogitsProcessor
from nanoengine.features.sampling.logprobs import compute_logprobs
from nanoengine.features.sampling.row_processor import ROWS_AT_ONCE
from nanoengine.features.sampling.token_logprobs import TokenLogprob, TokenLogprobs
from tests.features.sampling.rows import Bench, begin, logprobs_of, random_logits, run, sampling


@settings(max_examples=40)
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
    counts, sizes = [i % (most + 1) for i in range(n)], []

    def logits_of(part: slice) -> Tensor:
        sizes.append(len(logits[part]))
        return logits[part]

    entries = compute_logprobs(logits_of, own, most).entries(own.tolist(), counts)
    assert max(sizes) <= ROWS_AT_ONCE, "all logits of a long prompt are never there at once"
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


def test_the_entries_of_a_position_are_a_mapping() -> None:
    entry = TokenLogprobs(7, -3.0, 9, np.array([4, 5]), np.array([-0.5, -1.0]))
    same = {7: TokenLogprob(-3.0, 9), 4: TokenLogprob(-0.5, 1), 5: TokenLogprob(-1.0, 2)}
    assert (entry == same, same == entry, list(entry), len(entry)) == (True, True, list(same), 3)
    assert pickle.loads(pickle.dumps(entry)) == entry
    assert repr(entry) == repr(same)
    assert 6 not in entry
    with pytest.raises(KeyError):
        entry[6]
    likely = TokenLogprobs(5, -1.0, 2, np.array([4, 5]), np.array([-0.5, -1.0]))
    assert (list(likely), len(likely)) == ([5, 4], 2)


def test_there_are_as_many_as_the_vocabulary_has_and_best_of_needs_the_chosen_one() -> None:
    result = run(random_logits(20, 2, 5), [sampling(logprobs=20), sampling(best_of=2)])
    assert [len(entry) for entry in logprobs_of(result).values()] == [5, 1]


def test_a_processor_that_no_row_has_asked_for_is_not_called() -> None:
    """Whatever reports log probabilities beside it; else the step of all rows would end."""

    class Strange(LogitsProcessor):
        pieces: Mapping[int, Any] = {}

    bench = Bench(2, 10)
    bench.sampler.processors.append(Strange())
    bench.start(begin(0, own := sampling(logprobs=2)))
    result = bench.sample(random_logits(3, 1, 10), [0], [own.num_prompt_tokens])
    assert len(logprobs_of(result)) == 1


def test_rows_without_a_token_have_none_and_leave_those_of_others_alone() -> None:
    logits = random_logits(15, 4, 10)
    rows = [sampling(seed=i, logprobs=3) for i in range(3)] + [
        sampling(logprobs=1, allowed_token_ids=[1], min_tokens=1, stops=(1,))
    ]
    expected = logprobs_of(run(logits, rows))
    logits[1] = torch.nan
    result = run(logits, rows)
    assert (result.token_ids[1], result.token_ids[3]) == (UNKNOWN, NONE_LEFT)
    assert logprobs_of(result) == {number: expected[number] for number in (0, 2)}
