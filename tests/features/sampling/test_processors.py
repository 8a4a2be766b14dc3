"""What processors make of logits is what a slow reference makes, and transformers, of any wishes of rows that come and go."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.core.messages import NONE_LEFT, UNKNOWN, RowSampling, Run
from nanoengine.features.sampling.penalties import Penalties
from nanoengine.features.sampling.row_processor import ROWS_AT_ONCE
from tests.features.sampling.rows import Bench, TestDevice, begin, check, random_logits, reference, run, sampling

VOCAB = 12  # few tokens: counts are above one, and words are met often


def draw_wishes(rng: random.Random, vocab_size: int = VOCAB) -> dict[str, Any]:
    """Of one row: some of all that processors can do."""

    def tokens(least: int, most: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(rng.randint(least, most))]

    wishes = {
        "repetition_penalty": lambda: rng.uniform(0.01, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "logit_bias": lambda: {token: rng.uniform(-100, 100) for token in tokens(1, 5)},
        "allowed_token_ids": lambda: tokens(1, vocab_size),
        "min_tokens": lambda: rng.randint(1, 9),
        "stops": lambda: (*tokens(1, 3), vocab_size, vocab_size + 100),
    }
    return {name: wish() for name, wish in wishes.items() if rng.random() < 0.4}


@settings(max_examples=150)
@given(seed=st.integers(0, 10**6), vocab_size=st.sampled_from([1, 2, VOCAB, VOCAB, 31, 32, 33, 257]))
def test_what_is_made_of_logits_is_what_a_slow_reference_makes(seed: int, vocab_size: int) -> None:
    rng = random.Random(seed)
    token_ids = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 30))]
    own = sampling(prompt=rng.randint(1, len(token_ids)), **draw_wishes(rng, vocab_size))
    check(random_logits(seed, vocab_size), own, token_ids)


@pytest.mark.parametrize("seed", range(40))
def test_the_reference_is_what_transformers_does(seed: int) -> None:
    rng, logits = random.Random(seed), random_logits(seed, 1, VOCAB)
    ids = [rng.randrange(VOCAB) for _ in range(rng.randint(4, 20))]
    bias, penalty = {token: rng.uniform(-100, 100) for token in range(5)}, rng.uniform(0.01, 2)
    theirs: list[tuple[RowSampling, Any]] = [
        (sampling(prompt=2, repetition_penalty=penalty), transformers.RepetitionPenaltyLogitsProcessor(penalty)),
        (sampling(logit_bias=bias), transformers.SequenceBiasLogitsProcessor({(i,): own for i, own in bias.items()})),
        (
            sampling(prompt=3, min_tokens=5, stops=(3, 9)),
            transformers.MinNewTokensLengthLogitsProcessor(3, 5, [3, 9]),
        ),
    ]
    for own, other in theirs:
        expected = torch.tensor(reference(logits[0].tolist(), own, ids))
        torch.testing.assert_close(expected, other(torch.tensor([ids]), logits.clone())[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_rows_come_and_go_and_each_is_sampled_by_its_own_wishes_and_tokens(seed: int) -> None:
    """More of them than are worked on at once. Whoever starts again from its tokens goes on with the same bits."""
    rng, count = random.Random(seed), ROWS_AT_ONCE + 16
    bench = Bench(count, VOCAB)
    alive: dict[int, tuple[RowSampling, list[int]]] = {}
    for step in range(30):
        for row in rng.sample(range(count), rng.randint(1, 20)):
            own = sampling(prompt=2, seed=step, temperature=3.0, **draw_wishes(rng))
            alive[row] = own, [rng.randrange(VOCAB) for _ in range(rng.randint(2, 9))]
            bench.start(begin(row, *alive[row]), ended=[row] if rng.random() < 0.5 else [])
        rows = rng.sample(sorted(alive), len(alive))
        logits = random_logits(step, len(rows), VOCAB)
        tokens = bench.sample(logits.clone(), rows, [len(alive[row][1]) for row in rows], padding=2).token_ids
        again = rng.randrange(len(rows))
        for number, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            own, token_ids = alive[row]
            expected = torch.tensor(reference(logits[number].tolist(), own, token_ids))
            torch.testing.assert_close(bench.seen[-1][number], expected, rtol=1e-5, atol=1e-5)
            if number == again:
                other = Bench(1, VOCAB)
                other.start(begin(0, own, token_ids))
                other.sample(logits[number : number + 1].clone(), [0], [len(token_ids)])
                assert torch.equal(bench.seen[-1][number], other.seen[-1][0])
            token_ids.append(token)
            if token < 0:
                assert bool(expected.isinf().all())
                bench.start(ended=[row])
                del alive[row]


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


def test_seeds_of_64_bits_and_filters_reach_rows_with_processors() -> None:
    logits = random_logits(1, 30, 50)
    rows = [sampling(seed=i, temperature=3.0, top_k=4, presence_penalty=0.5, prompt=1) for i in range(30)]
    together = run(logits, rows).token_ids
    assert together == [run(logits[i : i + 1], [own]).token_ids[0] for i, own in enumerate(rows)]
    assert together != logits.argmax(-1).tolist()
    best, second = logits[0].topk(2).indices.tolist()
    own = [sampling(seed=s, temperature=9.0, top_k=1, min_tokens=1, stops=(best,)) for s in range(20)]
    found = {run(logits[:1], [row]).token_ids[0] for row in own}
    assert found == {second}, "top_k counts the tokens that are not banned"


def test_a_row_that_begins_anew_keeps_nothing_though_nobody_was_told_of_its_end() -> None:
    """The plan that said so was made behind a failed one, and was not carried out."""
    bench, logits = Bench(1, 20), random_logits(3, 1, 20)
    everything = sampling(logprobs=1, repetition_penalty=2, logit_bias={1: 1}, allowed_token_ids=[1, 2])
    bench.start(begin(0, everything))
    bench.start(begin(0, sampling(temperature=0)))
    samples = bench.sample(logits.clone(), [0], [5])
    assert (bench.seen[0] == logits).all()
    assert samples.extras == {}


# ---- what no token can be chosen from

WISHES: dict[str, dict[str, Any]] = {
    "none": {},
    "more than all": {"top_k": 11},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 1},
    "bias": {"logit_bias": {4: -100, 5: 100}},
    "allowed": {"allowed_token_ids": [0, 1]},  # NaN outside of them counts too
    "min_tokens": {"min_tokens": 4, "stops": (4,)},
}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)
def test_nan_and_infinity_stay_visible_and_concern_their_rows_alone(
    value: float, temperature: float, wish: dict[str, Any]
) -> None:
    logits = random_logits(12, 3, 10)
    rows = [sampling(seed=i, temperature=temperature, **wish) for i in range(3)]
    expected = run(logits, rows).token_ids
    logits[1, 4] = value
    assert run(logits, rows).token_ids == [expected[0], UNKNOWN, expected[2]]


@pytest.mark.parametrize(
    ("wish", "ruled_out", "expected"),
    [
        ({"allowed_token_ids": [1], "min_tokens": 1, "stops": (1,)}, [], NONE_LEFT),
        ({"min_tokens": 1, "stops": (0, 1, 2)}, [], NONE_LEFT),
        ({"min_tokens": 1, "stops": (0, 1, 2), "logit_bias": {2: 100}, "repetition_penalty": 2}, [], NONE_LEFT),
        ({"allowed_token_ids": [1, 2]}, [1, 2], NONE_LEFT),  # by the model
        ({}, [0, 1, 2], UNKNOWN),
        ({"repetition_penalty": 2}, [0, 1, 2], UNKNOWN),
    ],
    ids=str,
)
def test_a_row_that_may_sample_nothing_is_not_a_broken_one(
    wish: dict[str, Any], ruled_out: list[int], expected: int
) -> None:
    logits = random_logits(14, 2, 3)
    logits[0, ruled_out] = -torch.inf
    rows = [sampling(**wish), sampling(temperature=0)]
    assert run(logits, rows).token_ids == [expected, int(logits[1].argmax())]


# ---- runs with drafts


@pytest.mark.parametrize("wish", [{}, {"frequency_penalty": 1.0, "logprobs": 2}], ids=str)
@pytest.mark.parametrize("place", range(5))
def test_a_run_ends_at_the_first_accepted_sample_without_a_token(place: int, wish: dict[str, Any]) -> None:
    """What stands before it are tokens, and the row beside it is as it was."""
    own = sampling(temperature=1.0, **wish)
    logits = [random_logits(number, 6, VOCAB) for number in range(2)]
    lives: list[list[int]] = []
    for part in logits:
        bench, tokens = Bench(1, VOCAB), []
        bench.start(begin(0, own, [1, 2, 3]))
        for i in range(6):
            tokens += bench.sample(part[i : i + 1].clone(), [0], [3 + i]).token_ids
        lives.append(tokens)
    bench = Bench(2, VOCAB)
    bench.start(*(begin(row, own, [1, 2, 3]) for row in range(2)))
    logits[0][place] = torch.nan
    runs = [Run(row, 2, 5, True, tuple(tokens[:4])) for row, tokens in enumerate(lives)]
    result = bench.sample(torch.cat([part[:5] for part in logits]), [], [], runs)
    assert result.num_accepted == [place, 4]
    assert result.token_ids[: place + 1] == [*lives[0][:place], UNKNOWN]
    assert result.token_ids[5:] == lives[1][:5]
    assert bench.sample(logits[1][5:6].clone(), [1], [8]).token_ids == lives[1][5:6]


def test_what_is_sampled_behind_a_wrong_draft_may_be_without_a_token() -> None:
    """It is no token of the row, and nothing of it is kept."""
    own = sampling(temperature=0, allowed_token_ids=[4, 5])
    logits = torch.zeros(3, VOCAB)
    logits[:, 4] = 1.0
    logits[1, [4, 5]] = -torch.inf
    bench = Bench(1, VOCAB)
    bench.start(begin(0, own))
    result = bench.sample(logits.clone(), [], [], [Run(0, 2, 3, True, (5, 4))])
    assert (result.num_accepted, result.token_ids[:2]) == ([0], [4, NONE_LEFT])
    assert bench.last_tokens[0] == 4
    assert bench.sample(logits[:1].clone(), [0], [4]).token_ids == [4]
