"""Penalties, against a slow reference and transformers; and the memory that counts take."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from nanoengine.sampling.penalties import Penalties
from tests.sampling.rows import Bench, TestDevice, begin, check, random_logits, reference, sampling

VOCAB = 12
TOKENS = st.integers(0, VOCAB - 1)


@settings(deadline=None, max_examples=60)
@given(
    penalty=st.floats(0.01, 2),
    prompt=st.lists(TOKENS, min_size=1, max_size=9),
    output=st.lists(TOKENS, max_size=9),
    seed=st.integers(0, 1000),
)
def test_repetition_is_penalized_as_transformers_does_it(
    penalty: float, prompt: list[int], output: list[int], seed: int
) -> None:
    logits = random_logits(seed, VOCAB)
    found = check(logits, sampling(prompt=len(prompt), repetition_penalty=penalty), prompt + output)
    other = RepetitionPenaltyLogitsProcessor(penalty)
    torch.testing.assert_close(found, other(torch.tensor([prompt + output]), logits[None])[0])


@settings(deadline=None, max_examples=60)
@given(
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
    repetition=st.floats(0.01, 2),
    prompt=st.lists(TOKENS, min_size=1, max_size=9),
    output=st.lists(TOKENS, max_size=30),
)
def test_all_penalties_together(
    frequency: float, presence: float, repetition: float, prompt: list[int], output: list[int]
) -> None:
    own = sampling(
        prompt=len(prompt), frequency_penalty=frequency, presence_penalty=presence, repetition_penalty=repetition
    )
    check(random_logits(len(output), VOCAB), own, prompt + output)


def test_bias_comes_before_penalties() -> None:
    logits = torch.zeros(VOCAB)
    own = sampling(prompt=1, logit_bias={3: 8.0}, repetition_penalty=2.0, presence_penalty=1.0)
    assert check(logits, own, [0, 3])[3] == 8.0 / 2.0 - 1.0


def test_frequency_counts_the_output_and_not_the_prompt() -> None:
    own = sampling(prompt=3, frequency_penalty=0.5, presence_penalty=0.25)
    found = check(torch.zeros(VOCAB), own, [4, 4, 5, 5, 6, 6, 6])
    assert found[[4, 5, 6, 7]].tolist() == [0.0, -0.75, -1.75, 0.0]


def test_a_life_lived_through_and_a_restart_are_the_same_to_the_bit() -> None:
    own = sampling(prompt=2, frequency_penalty=0.3, presence_penalty=0.7, repetition_penalty=1.3, temperature=0)
    lived, resumed = Bench(2, VOCAB), Bench(2, VOCAB)
    token_ids = [3, 4]
    lived.start(begin(0, own, token_ids))
    for step in range(30):
        logits = random_logits(step, 1, VOCAB)
        token_ids += lived.sample(logits.clone(), [0], [len(token_ids)]).token_ids
        resumed.start(begin(step % 2, own, token_ids[:-1]))
        resumed.sample(logits.clone(), [step % 2], [len(token_ids) - 1])
        assert torch.equal(lived.seen[-1], resumed.seen[-1])


def test_rows_come_and_go_and_never_see_each_others_counts() -> None:
    rng, bench = random.Random(0), Bench(40, VOCAB)
    alive: dict[int, tuple] = {}  # type: ignore[type-arg]
    for step in range(60):
        for row in rng.sample(range(40), rng.randint(1, 30)):
            if row in alive:
                bench.start(ended=[row])
                del alive[row]
            else:
                own = sampling(prompt=2, frequency_penalty=rng.uniform(-2, 2), repetition_penalty=rng.uniform(0.5, 2))
                alive[row] = own, [rng.randrange(VOCAB) for _ in range(rng.randint(2, 9))]
                bench.start(begin(row, *alive[row]))
        rows = sorted(alive)
        if rows:
            logits = random_logits(step, len(rows), VOCAB)
            tokens = bench.sample(logits.clone(), rows, [len(alive[row][1]) for row in rows]).token_ids
            for number, row in enumerate(rows):
                expected = torch.tensor(reference(logits[number].tolist(), *alive[row]))
                torch.testing.assert_close(bench.seen[-1][number], expected, rtol=1e-5, atol=1e-5)
                alive[row][1].append(tokens[number])


def test_counts_are_allocated_for_the_first_row_that_asks_and_never_again() -> None:
    """Warm-up sees all that they ever take, and nobody pays who asks for none."""
    penalties = Penalties(1000, VOCAB, TestDevice())
    penalties.start([begin(row, sampling()) for row in range(100)])
    assert penalties._counts is None
    penalties.start([begin(3, sampling(presence_penalty=1))])
    counts = penalties.counts
    assert counts.shape == (1000, VOCAB)
    penalties.start([begin(row, sampling(presence_penalty=1)) for row in range(4, 1000)])
    assert penalties.counts is counts
    assert int(counts[3:].sum()) == 997, "token 0 is in each prompt"


@pytest.mark.parametrize("penalty", [1e-5, 2.0])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4])
def test_the_limits_of_a_penalty_keep_finite_logits_finite(penalty: float, scale: float) -> None:
    logits = random_logits(1, VOCAB) * scale
    own = sampling(repetition_penalty=penalty, presence_penalty=-2, frequency_penalty=2)
    assert check(logits, own, list(range(VOCAB)) * 2).isfinite().all()
