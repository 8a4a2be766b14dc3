"""bad_words, against a slow reference and transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor

from tests.sampling.rows import Bench, begin, check, random_logits, sampling

VOCAB = 6  # few tokens: words are met often
TOKENS = st.integers(0, VOCAB - 1)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), min_size=1, max_size=12, unique=True)


@settings(deadline=None, max_examples=120)
@given(words=WORDS, output=st.lists(TOKENS, max_size=9), seed=st.integers(0, 1000))
def test_words_are_forbidden_as_transformers_forbids_them(
    words: list[tuple[int, ...]], output: list[int], seed: int
) -> None:
    logits = random_logits(seed, VOCAB)
    found = check(logits, sampling(bad=words), [1, 2, 3, *output])
    if output:  # transformers looks at a prompt too: here it is given none
        other = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=VOCAB + 1)
        torch.testing.assert_close(found, other(torch.tensor([output]), logits[None])[0])


def test_a_word_may_begin_in_the_output_only() -> None:
    logits = random_logits(1, VOCAB)
    own = sampling(prompt=2, bad=[[1, 2, 3]])
    assert torch.equal(check(logits, own, [1, 2]), logits)
    assert torch.equal(check(logits, own, [0, 1, 2]), logits)
    assert check(logits, own, [0, 0, 1, 2])[3] == -torch.inf


def test_a_word_of_one_token_is_never_sampled() -> None:
    logits = random_logits(2, VOCAB)
    assert check(logits, sampling(bad=[[4], [4], [0, 4]]), [4, 4, 4])[4] == -torch.inf


@settings(deadline=None, max_examples=60)
@given(words=WORDS, seed=st.integers(0, 1000))
def test_no_word_is_ever_generated(words: list[tuple[int, ...]], seed: int) -> None:
    """Seen from the end: whatever the device samples, by itself."""
    words = [word for word in words if len(word) > 1 or word[0] > 2] or [(5,)]
    bench = Bench(1, VOCAB)
    bench.start(begin(0, sampling(bad=words, seed=seed, temperature=3.0)))
    output: list[int] = []
    for length in range(25):
        logits = random_logits(seed + length, 1, VOCAB)
        [token] = bench.sample(logits, [0], [3 + length]).token_ids
        if token < 0:  # so many words may leave nothing
            break
        output.append(token)
        assert not any(tuple(output[-len(word) :]) == word for word in words)


def test_longer_words_than_before_leave_other_rows_what_they_knew() -> None:
    logits = random_logits(3, VOCAB)
    bench, short = Bench(3, VOCAB), sampling(bad=[[1, 2]], temperature=0)
    bench.start(begin(0, short, [0, 0, 0, 1]))
    bench.start(begin(1, sampling(bad=[[1, 2, 3, 4, 5]]), [0, 0, 0, 1, 2, 3, 4]))
    bench.sample(logits.expand(2, -1).clone(), [0, 1], [4, 7])
    assert bench.seen[-1][0][2] == -torch.inf
    assert bench.seen[-1][1][5] == -torch.inf
    assert int(bench.seen[-1].isinf().sum()) == 2


@pytest.mark.parametrize("count", [1, 128])
def test_words_of_rows_beside_each_other_do_not_mix(count: int) -> None:
    logits = random_logits(4, VOCAB)
    bench = Bench(4, VOCAB)
    many = [(i % 2, *([0] * (i // 2)), 5) for i in range(count)]
    rows = {0: sampling(bad=many), 1: sampling(bad=[[3, 3]]), 2: sampling(), 3: sampling(bad=[[2], [3, 1]])}
    outputs = {0: [0, 0, 0], 1: [3], 2: [3], 3: [3]}
    bench.start(*(begin(row, own, [1, 1, 1, *outputs[row]]) for row, own in rows.items()))
    order = [3, 1, 0, 2]
    bench.sample(logits.expand(4, -1).clone(), order, [3 + len(outputs[row]) for row in order])
    for row, seen in zip(order, bench.seen[-1], strict=True):
        assert torch.equal(seen, check(logits, rows[row], [1, 1, 1, *outputs[row]]))
