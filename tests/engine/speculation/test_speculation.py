"""Which drafts a step verifies: against all that could have been chosen; and what is learned from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, count, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.engine.messages import UNKNOWN
from nanoengine.engine.sequence import Sequence as Seq
from nanoengine.engine.speculation.acceptance import Acceptance
from nanoengine.engine.speculation.speculation import LEAST_GAIN, Candidate, Speculation
from nanoengine.engine.speculation.step_costs import StepCosts
from tests.engine.speculation.guessers import HOSTILE, Scripted, right, speculation, wrong
from tests.engine.toys import FAST, VOCAB_SIZE, continuation, make_sequence, tell

FREE = StepCosts([(1, 1.0), (1000, 1.0)])
DEAR = StepCosts([(1, 1.0), (1000, 1000.0)])

numbers = count()


def sequence(length: int = 3, **params: Any) -> Seq:
    """One that is decoded."""
    number = next(numbers)
    seq = make_sequence(number, [number + 7 * i for i in range(length)], **params)
    seq.limit_length(10**6)
    return seq


def choose(own: Speculation, *seqs: Seq, most: int = 99, budget: int = 999) -> list[list[int]]:
    """The drafts of each."""
    chosen = own.choose([Candidate(seq, most) for seq in seqs], len(seqs), budget)
    assert all(chosen.values()), "who has no drafts is not named"
    return [chosen.get(seq, []) for seq in seqs]


def proposer(own: Speculation) -> Scripted:
    assert isinstance(own.proposer, Scripted)
    return own.proposer


# ---- how many


@pytest.mark.parametrize(("most", "budget", "expected"), [(99, 99, 6), (2, 99, 2), (99, 3, 3), (99, 1, 1)])
def test_drafts_that_cost_nothing_are_taken_as_far_as_there_is_room(most: int, budget: int, expected: int) -> None:
    seq = sequence()
    own = speculation(num_drafts=6, costs=FREE)
    assert choose(own, seq, most=most, budget=budget) == [continuation(seq.token_ids, expected)]


@pytest.mark.parametrize(("costs", "budget", "expected"), [(DEAR, 99, False), (FREE, 0, False), (FREE, 1, True)])
def test_it_is_known_where_no_guess_could_be_worth_it(costs: StepCosts, budget: int, expected: bool) -> None:
    assert speculation(costs=costs).may_pay(2, budget) == expected
    if not expected:
        assert choose(speculation(costs=costs), sequence(), sequence(), budget=budget) == [[], []]


def test_places_that_no_draft_came_to_have_no_rate() -> None:
    own, seq = speculation(num_drafts=4), sequence()
    own.settle(seq, 4, 0)
    own.settle(seq, 4, 1)
    assert own.stats.acceptance_by_place == [0.5, 0.0]


def test_a_model_whose_guesses_were_wrong_is_asked_again_some_day() -> None:
    own, seq = modelled(0.3), sequence()
    while choose(own, seq)[0]:
        own.settle(seq, 5, 0)
    assert any(choose(own, seq)[0] for _ in range(300))


def test_a_full_step_has_no_drafts_and_a_step_of_few_has() -> None:
    """Steps cost the same up to 8 tokens; from there on, each token costs as much."""
    own = speculation(costs=StepCosts([(8, 1.0)]))
    assert choose(own, *[sequence() for _ in range(8)]) == [[]] * 8
    assert sum(map(len, choose(own, *[sequence() for _ in range(4)]))) == 4


curves = st.lists(st.floats(0.001, 1), min_size=5, max_size=5).map(
    lambda steps: [(1 + 3 * i, 1 + seconds) for i, seconds in enumerate(accumulate(steps))]
)
histories = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), max_size=8)


@FAST
@given(
    histories=st.lists(histories, min_size=1, max_size=3),
    curve=curves,
    budget=st.integers(0, 9),
    num_others=st.integers(0, 4),
)
def test_no_other_choice_brings_more_tokens_a_second(
    histories: list[list[tuple[int, int]]], curve: list[tuple[int, float]], budget: int, num_others: int
) -> None:
    costs = StepCosts(curve)
    own = speculation(num_drafts=4, costs=FREE)
    seqs, known = [sequence() for _ in histories], [Acceptance(4) for _ in histories]
    choose(own, *seqs)
    for seq, acceptance, history in zip(seqs, known, histories, strict=True):
        for num_drafts, num_accepted in history:
            own.settle(seq, num_drafts, min(num_drafts, num_accepted))
            acceptance.record(num_drafts, min(num_drafts, num_accepted))
    own.costs = costs
    num_tokens = len(seqs) + num_others

    def rate(counts: Sequence[int]) -> float:
        expected = sum(sum(acceptance.chances(n)) for acceptance, n in zip(known, counts, strict=True))
        return (num_tokens + expected) / costs.seconds(num_tokens + sum(counts))

    chosen = own.choose([Candidate(seq, 9) for seq in seqs], num_tokens, budget)
    counts = [len(chosen.get(seq, [])) for seq in seqs]
    assert sum(counts) <= budget
    best = max(rate(other) for other in product(range(5), repeat=len(seqs)) if sum(other) <= budget)
    if sum(counts):
        assert rate(counts) == pytest.approx(best)
        assert best > LEAST_GAIN * rate([0] * len(seqs))
    else:
        assert best <= LEAST_GAIN * rate(counts) * (1 + 1e-9)


def test_sequences_whose_guesses_came_true_have_more_drafts() -> None:
    own = speculation(num_drafts=4, costs=StepCosts([(1, 1.0), (6, 1.5), (20, 9.0)]))
    good, bad = sequence(), sequence()
    choose(own, good, bad)
    for _ in range(10):
        own.settle(good, 4, 4)
        own.settle(bad, 4, 0)
    assert choose(own, good, bad) == [continuation(good.token_ids, 4), []]
    assert own.stats.num_not_worth == 1


# ---- what is guessed


@pytest.mark.parametrize("say", HOSTILE)
def test_drafts_are_tokens_of_the_vocabulary_whatever_is_said(say: str) -> None:
    own = speculation(HOSTILE[say], num_drafts=7, costs=FREE)
    seqs = [sequence(length) for length in range(1, 12)]
    found = choose(own, *seqs, most=6)
    for drafts in found:
        assert len(drafts) <= 6
        assert all(type(token) is int and 0 <= token < VOCAB_SIZE for token in drafts)
    assert own.stats.num_unknown == found.count([])
    assert own.stats.num_errors == (3 if say == "raising" else 0), "of 3, 6 and 9 tokens"


@pytest.mark.parametrize("odd", [VOCAB_SIZE, -1, 2**70, True, 1.0, None, "7"], ids=repr)
def test_a_guess_ends_before_what_is_no_token(odd: Any) -> None:
    own = speculation(lambda _, most: [5, 6, odd, 7][:most], num_drafts=9, costs=FREE)
    assert choose(own, sequence()) == [[5, 6]]


def test_nothing_is_guessed_behind_an_end() -> None:
    own = speculation(lambda *_: [5, 6, 9, 7], num_drafts=9, costs=FREE)
    assert choose(own, sequence(stop_token_ids=[9]), sequence(eos=[6]), sequence(eos=[6], ignore_eos=True)) == [
        [5, 6],
        [5],
        [5, 6, 9, 7],
    ]


def test_tokens_on_their_way_are_guessed_too_and_are_no_drafts() -> None:
    own, seq = speculation(num_drafts=3, costs=FREE), sequence()
    seq.num_tokens += 2
    assert choose(own, seq) == [continuation(seq.token_ids, 5)[2:]]
    short = speculation(lambda *_: [1, 2], costs=FREE)
    assert choose(short, seq) == [[]]
    assert short.stats.num_unknown == 1


def test_a_guesser_that_raises_is_asked_no_more() -> None:
    calls = []

    def raises(token_ids: Sequence[int], most: int) -> list[int]:  # noqa: ARG001
        calls.append(len(token_ids))
        raise RuntimeError("no idea")

    own, seq = speculation(raises, costs=FREE), sequence()
    for _ in range(3):
        assert choose(own, seq) == [[]]
    assert calls == [3]
    assert (own.stats.num_errors, own.stats.num_unknown) == (1, 3)
    own.end(seq)
    assert proposer(own).ended == [], "nor is it told of the end"


@pytest.mark.parametrize("said", [None, 7], ids=repr)
def test_a_guess_that_is_no_list_is_a_failure_of_its_guesser(said: Any) -> None:
    def say(token_ids: Sequence[int], most: int) -> Any:
        return said if len(token_ids) == 3 else right(token_ids, most)

    own, a, b = speculation(say), sequence(3), sequence(4)
    assert choose(own, a, b) == [[], continuation(b.token_ids, 4)]
    assert own.stats.num_errors == 1


# ---- what is learned


def test_a_guess_that_was_not_verified_is_compared_with_what_came() -> None:
    """So a sequence has drafts again when its guesses come true."""
    own, seq = speculation(num_drafts=4, costs=StepCosts([(1, 1.0), (8, 5.0)])), sequence()
    choose(own, seq)
    for _ in range(15):
        own.settle(seq, 4, 0)
    assert choose(own, seq) == [[]]
    runs = own.stats.num_runs
    for _ in range(30):
        tell(seq, *continuation(seq.token_ids, 1))
        if choose(own, seq) != [[]]:
            break
    else:
        raise AssertionError("it never had drafts again")
    assert own.stats.num_runs == runs, "which counts as no run"


@pytest.mark.parametrize("num_known", [0, 1])
def test_guesses_that_would_have_been_wrong_bring_no_drafts(num_known: int) -> None:
    own, seq = speculation(wrong, num_drafts=4, costs=StepCosts([(1, 1.0), (8, 5.0)])), sequence()
    choose(own, seq)
    for _ in range(15):
        own.settle(seq, 4, 0)
    for _ in range(30):
        tell(seq, *continuation(seq.token_ids, 1 + num_known))
        assert choose(own, seq) == [[]]


def test_the_end_of_a_sequence_is_told_and_nothing_of_it_is_kept() -> None:
    own, seq = speculation(costs=FREE), sequence()
    choose(own, seq)
    tell(seq, 1, 2)
    own.end(seq)
    own.end(seq)
    assert proposer(own).ended == [seq.token_ids]
    own.settle(seq, 2, 1)  # its last run comes later
    assert own.stats.num_drafts == 2
    choose(own, seq)
    assert proposer(own).num_begun == 2


def test_a_guesser_that_raises_at_the_end_is_counted() -> None:
    class Sulking(Scripted):
        def end(self, token_ids: Sequence[int]) -> None:
            raise RuntimeError("not yet")

        def begin(self, num_prompt_tokens: int, cache_salt: bytes) -> Scripted:
            return self

    own = Speculation(Sulking(right), num_drafts=3, vocab_size=VOCAB_SIZE, costs=FREE)
    seq = sequence()
    choose(own, seq)
    own.end(seq)
    assert own.stats.num_errors == 1


def test_a_guesser_begins_with_the_prompt_and_the_salt_of_its_sequence() -> None:
    begun: list[tuple[int, bytes]] = []

    class Listening(Scripted):
        def begin(self, num_prompt_tokens: int, cache_salt: bytes) -> Scripted:
            begun.append((num_prompt_tokens, cache_salt))
            return self

    own = Speculation(Listening(right), num_drafts=3, vocab_size=VOCAB_SIZE, costs=FREE)
    seq = make_sequence(0, [1, 2, 3])
    seq.cache_salt = b"mine"
    tell(seq, 4)
    for _ in range(2):
        choose(own, seq)
    assert begun == [(3, b"mine")]


def test_counters_are_a_copy_that_changes_no_more() -> None:
    own, seq = speculation(num_drafts=4, costs=StepCosts([(1, 1.0), (64, 2.0)])), sequence()
    choose(own, seq)
    own.settle(seq, 4, 2)
    before = own.snapshot()
    assert (before.num_runs, before.num_drafts, before.num_accepted) == (1, 4, 2)
    assert (before.tried_at, before.accepted_at) == ([1, 1, 1, 0], [1, 1, 0, 0])
    assert before.step_seconds == ((1, 1.0), (64, 2.0))
    assert before.acceptance_rate == 0.5
    own.settle(seq, 2, 2)
    own.costs.record(1, 5.0)
    assert (before.num_runs, before.tried_at, before.step_seconds[0]) == (1, [1, 1, 1, 0], (1, 1.0))
    assert own.snapshot().accepted_at == [2, 2, 0, 0]
    assert speculation().snapshot().acceptance_rate == 0


# ---- where whoever computes the steps guesses


def modelled(guess_share: float) -> Speculation:
    costs = StepCosts([(1, 1.0), (64, 1.0)])
    return Speculation(None, num_drafts=5, vocab_size=VOCAB_SIZE, costs=costs, guess_share=guess_share)


@pytest.mark.parametrize(
    ("guess_share", "is_right"),
    [
        (0.0, lambda count: count == 5),
        (0.2, lambda count: 0 < count < 5),
        (9.0, lambda count: count == 0),
    ],
    ids=["free", "some", "dear"],
)
def test_guesses_that_take_time_are_fewer(guess_share: float, is_right: Callable[[int], bool]) -> None:
    own, seq = modelled(guess_share), sequence()
    [drafts] = choose(own, seq)
    assert is_right(len(drafts))
    assert set(drafts) <= {UNKNOWN}
    own.end(seq)
    assert own.stats.num_errors == 0
