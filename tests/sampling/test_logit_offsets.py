"""logit_bias and the ban of min_tokens, against a slow reference and transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinNewTokensLengthLogitsProcessor, SequenceBiasLogitsProcessor

from tests.sampling.rows import Bench, begin, check, random_logits, run, sampling

VOCAB = 40
BIASES = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=VOCAB)


@settings(deadline=None, max_examples=50)
@given(bias=BIASES, seed=st.integers(0, 1000))
def test_a_bias_is_added_as_transformers_adds_it(bias: dict[int, float], seed: int) -> None:
    logits = random_logits(seed, VOCAB)
    found = check(logits, sampling(logit_bias=bias), [1, 2, 3, 4])
    if bias:
        other = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items() if value} or {(0,): 0.0})
        torch.testing.assert_close(found, other(torch.tensor([[1, 2, 3, 4]]), logits[None])[0])


def test_a_bias_of_100_decides_and_a_bias_of_its_row_only() -> None:
    logits = random_logits(1, 3, VOCAB)
    tokens = run(
        logits, [sampling(logit_bias={5: 100}), sampling(temperature=0), sampling(logit_bias={6: 100})]
    ).token_ids
    assert tokens == [5, int(logits[1].argmax()), 6]


@pytest.mark.parametrize("length", [0, 1, 4, 5, 6, 30])
def test_nothing_ends_a_sequence_before_min_tokens(length: int) -> None:
    logits, prompt, stops = random_logits(2, VOCAB), [1] * 7, (3, 9, 11)
    token_ids = [*prompt, *range(12, 12 + length % 20)] + [0] * (length - length % 20)
    own = sampling(prompt=7, min_tokens=5, stops=stops)
    found = check(logits, own, token_ids)
    other = MinNewTokensLengthLogitsProcessor(7, 5, list(stops))
    torch.testing.assert_close(found, other(torch.tensor([token_ids]), logits[None])[0])
    assert bool(found[3].isinf()) == (length < 5)


def test_the_ban_ends_where_positions_say_so_and_no_message_does() -> None:
    bench, own = Bench(2, VOCAB), sampling(min_tokens=3, stops=(4,), temperature=0)
    bench.start(begin(1, own))
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 5.0
    tokens = [bench.sample(logits.clone(), [1], [position]).token_ids[0] for position in range(3, 8)]
    assert [token == 4 for token in tokens] == [False] * 3 + [True] * 2


def test_an_end_of_text_outside_of_the_vocabulary_is_never_sampled_anyway() -> None:
    check(random_logits(3, VOCAB), sampling(min_tokens=3, stops=(4, VOCAB, VOCAB + 100)), [0] * 3)


def test_min_tokens_bans_nothing_where_nothing_ends_it() -> None:
    logits = random_logits(4, VOCAB)
    assert torch.equal(check(logits, sampling(min_tokens=3), [0] * 3), logits)


def test_top_k_counts_the_tokens_that_are_not_banned() -> None:
    logits = random_logits(10, 1, 12)
    best, second = logits[0].topk(2).indices.tolist()
    own = [sampling(seed=s, temperature=9.0, top_k=1, min_tokens=1, stops=(best,)) for s in range(20)]
    assert {run(logits, [row]).token_ids[0] for row in own} == {second}
