"""All processors together: rows beside each other, rows without a token, runs with drafts. Each has a file of its own, too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nanoengine.core.messages import NONE_LEFT, UNKNOWN, Run
from nanoengine.sampling.row_processor import ROWS_AT_ONCE
from tests.sampling.rows import Bench, begin, logprobs_of, random_logits, reference, run, sampling


def test_more_rows_than_are_worked_on_at_once() -> None:
    count = 2 * ROWS_AT_ONCE + 7
    logits = random_logits(5, count, 40)
    rows = [
        sampling(seed=i, temperature=0, repetition_penalty=1.5, allowed_token_ids=[0, i % 40, 3], logprobs=2)
        for i in range(count)
    ]
    result = run(logits, rows)
    for i in range(count):
        expected = torch.tensor(reference(logits[i].tolist(), rows[i], [0] * 3))
        assert result.token_ids[i] == int(expected.argmax())
    assert len(logprobs_of(result)) == count


def test_seeds_of_64_bits_and_filters_reach_rows_with_processors() -> None:
    logits = random_logits(1, 30, 50)
    rows = [sampling(seed=i, temperature=3.0, top_k=4, presence_penalty=0.5, prompt=1) for i in range(30)]
    together = run(logits, rows).token_ids
    assert together == [run(logits[i : i + 1], [own]).token_ids[0] for i, own in enumerate(rows)]
    assert together != logits.argmax(-1).tolist()


def test_a_row_that_begins_anew_keeps_nothing_though_nobody_was_told_of_its_end() -> None:
    """The plan that said so was made behind a failed one, and was not carried out."""
    bench, logits = Bench(1, 20), random_logits(3, 1, 20)
    everything = sampling(logprobs=1, repetition_penalty=2, bad=[[1]], logit_bias={1: 1}, allowed_token_ids=[1, 2])
    bench.start(begin(0, everything))
    bench.start(begin(0, sampling(temperature=0)))
    samples = bench.sample(logits.clone(), [0], [5])
    assert (bench.seen[0] == logits).all()
    assert samples.extras == {}


# ---- what no token can be chosen from

WISHES: dict[str, dict[str, Any]] = {
    "none": {},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 1},
    "bias": {"logit_bias": {4: -100, 5: 100}},
    "allowed": {"allowed_token_ids": [0, 1]},  # NaN outside of them counts too
    "bad words": {"bad": [[4], [0, 4]]},
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
    "wish",
    [
        {"allowed_token_ids": [1], "bad": [[1]]},
        {"min_tokens": 1, "stops": (0, 1, 2)},
        {"bad": [[0], [1], [2]], "logit_bias": {2: 100}, "repetition_penalty": 2},
    ],
    ids=str,
)
def test_a_row_that_may_sample_nothing_is_not_a_broken_one(wish: dict[str, Any]) -> None:
    found = run(random_logits(14, 2, 3), [sampling(**wish), sampling(temperature=0)]).token_ids
    assert found[0] == NONE_LEFT
    assert found[1] >= 0


def test_an_empty_mask_and_allowed_tokens_that_the_model_rules_out_leave_nothing() -> None:
    logits = random_logits(15, 3, 70)
    logits[1, [2, 3]] = -torch.inf
    rows = [sampling(), sampling(allowed_token_ids=[2, 3]), sampling(temperature=0)]
    assert run(logits, rows, masks={0: set()}).token_ids == [NONE_LEFT, NONE_LEFT, int(logits[2].argmax())]


def test_logits_that_are_all_minus_infinity_are_broken_where_nothing_was_forbidden() -> None:
    logits = random_logits(13, 2, 10)
    logits[0] = -torch.inf
    rows = [sampling(temperature=0), sampling(temperature=0, allowed_token_ids=[3])]
    assert run(logits, rows).token_ids == [UNKNOWN, 3]


# ---- runs with drafts

VOCAB = 23


@pytest.mark.parametrize("wish", [{}, {"frequency_penalty": 1.0, "bad": [[1, 2], [3, 4, 5]], "logprobs": 2}], ids=str)
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
    own = sampling(temperature=0, allowed_token_ids=[4, 5], bad=[[5, 4], [5, 5]])
    logits = torch.zeros(3, VOCAB)
    logits[:, 4] = 1.0
    bench = Bench(1, VOCAB)
    bench.start(begin(0, own))
    result = bench.sample(logits.clone(), [], [], [Run(0, 2, 3, True, (5, 4))])
    assert (result.num_accepted, result.token_ids[:2]) == ([0], [4, NONE_LEFT])
    assert bench.last_tokens[0] == 4
    assert bench.sample(logits[:1].clone(), [0], [4]).token_ids == [4]
