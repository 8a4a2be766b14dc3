"""Which drafts a step verifies, against all that could have been chosen; and what is learned from them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.core.messages import UNKNOWN, Run, StepPlan, StepResult
from nanoengine.core.scheduler import Step
from nanoengine.core.sequence import Sequence
from nanoengine.sampling.params import SamplingParams
from nanoengine.speculation.acceptance import Acceptance
from nanoengine.speculation.drafter import Candidate
from nanoengine.speculation.speculation import CONSTRAINT, LEAST_GAIN, Speculation
from nanoengine.speculation.step_costs import StepCosts
from tests.core.toys import VOCAB
from tests.speculation.scripted import FAST, FREE, Say, Scripted, continuation, right, sequence, speculation, wrong

DEAR = StepCosts([(1, 1.0), (1000, 1000.0)])


def choose(own: Speculation, *seqs: Sequence, most: int = 99, budget: int = 999, others: int = 0) -> list[list[int]]:
    """The drafts of each in a step with so many tokens of prompts."""
    candidates = [Candidate(seq, len(seq.token_ids), most) for seq in seqs]
    chosen = own.choose(candidates, len(seqs), len(seqs) + others, budget)
    assert all(chosen.values()), "a sequence without drafts is not named"
    return [chosen.get(seq, []) for seq in seqs]


def proposer(own: Speculation) -> Scripted:
    assert isinstance(own.proposer, Scripted)
    return own.proposer


# ---- how many


@pytest.mark.parametrize(("most", "budget", "expected"), [(99, 99, 6), (2, 99, 2), (99, 3, 3), (99, 1, 1)])
def test_drafts_that_cost_nothing_are_taken_as_far_as_there_is_room(most: int, budget: int, expected: int) -> None:
    seq = sequence()
    own = speculation(num_drafts=6)
    assert choose(own, seq, most=most, budget=budget) == [continuation(seq.token_ids, expected)]


@pytest.mark.parametrize(("costs", "budget"), [(DEAR, 99), (FREE, 0)])
def test_where_no_draft_can_pay_no_candidate_is_looked_at(costs: StepCosts, budget: int) -> None:
    own = speculation(costs=costs)
    candidates = iter([Candidate(sequence(), 3, 9), Candidate(sequence(), 3, 9)])
    assert own.choose(candidates, 2, 2, budget) == {}
    assert not own.postpone(candidates, 2, budget)
    assert len(list(candidates)) == 2
    assert (own.stats.num_full, own.stats.num_postponed) == (2, 0)


def test_a_full_step_has_no_drafts_and_a_step_of_few_has() -> None:
    """Steps cost the same up to 8 tokens; from there on, each token costs as much. Tokens of prompts fill steps too."""
    own = speculation(costs=StepCosts([(8, 1.0)]))
    assert choose(own, *[sequence() for _ in range(8)]) == [[]] * 8
    assert choose(own, sequence(), others=7) == [[]]
    assert sum(map(len, choose(own, *[sequence() for _ in range(4)]))) == 4
    assert sum(map(len, choose(own, sequence(), others=5))) == 2


curves = st.lists(st.floats(0.001, 1), min_size=5, max_size=5).map(
    lambda steps: [(1 + 3 * i, 1 + seconds) for i, seconds in enumerate(accumulate(steps))]
)
histories = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), max_size=8)


@FAST
@given(
    histories=st.lists(histories, min_size=1, max_size=3),
    curve=curves,
    budget=st.integers(0, 9),
    others=st.integers(0, 4),
)
def test_no_other_choice_brings_more_tokens_a_second(
    histories: list[list[tuple[int, int]]], curve: list[tuple[int, float]], budget: int, others: int
) -> None:
    own = speculation(num_drafts=4)
    seqs, known = [sequence() for _ in histories], [Acceptance(4) for _ in histories]
    choose(own, *seqs)
    for seq, acceptance, history in zip(seqs, known, histories, strict=True):
        for num_drafts, num_accepted in history:
            own.settle(seq, num_drafts, min(num_drafts, num_accepted))
            acceptance.record(num_drafts, min(num_drafts, num_accepted))
    costs = own.costs = StepCosts(curve)
    num_tokens = len(seqs) + others

    def rate(counts: Seq[int]) -> float:
        expected = sum(sum(acceptance.chances(n)) for acceptance, n in zip(known, counts, strict=True))
        return (num_tokens + expected) / costs.seconds(num_tokens + sum(counts))

    counts = list(map(len, choose(own, *seqs, most=9, budget=budget, others=others)))
    assert sum(counts) <= budget
    best = max(rate(other) for other in product(range(5), repeat=len(seqs)) if sum(other) <= budget)
    if sum(counts):
        assert rate(counts) == pytest.approx(best)
        assert best > LEAST_GAIN * rate([0] * len(seqs))
    else:
        assert best <= LEAST_GAIN * rate(counts) * (1 + 1e-9)


# ---- what is guessed


@pytest.mark.parametrize("odd", [VOCAB, -1, 2**70, True, 1.0, None, "7"], ids=repr)
def test_a_guess_ends_before_what_is_no_token(odd: Any) -> None:
    own = speculation(lambda _, most: [5, 6, odd, 7][:most], num_drafts=9)
    assert choose(own, sequence()) == [[5, 6]]


def test_nothing_is_guessed_behind_an_end() -> None:
    own = speculation(lambda *_: [5, 6, 9, 7], num_drafts=9)
    seqs = sequence(stop_token_ids=[9]), sequence(eos=(6,)), sequence(eos=(6,), ignore_eos=True)
    assert choose(own, *seqs) == [[5, 6], [5], [5, 6, 9, 7]]


def test_a_sequence_without_the_wish_has_no_drafts_and_counts_nowhere() -> None:
    own, silent = speculation(), sequence()
    silent.params = SamplingParams(speculate=False)
    assert choose(own, silent) == [[]]
    assert not proposer(own).begun
    assert own.stats.num_unknown == own.stats.num_not_worth == own.stats.num_full == 0


class Grammar:
    """It forces some tokens, and allows small ones behind them."""

    def __init__(self, forced: list[int]):
        self._forced = forced

    def forced(self, most: int) -> list[int]:
        return self._forced[:most]

    def allowed(self, drafts: list[int]) -> list[int]:
        return next((drafts[:place] for place, token in enumerate(drafts) if token > 7), drafts)


@pytest.mark.parametrize(
    ("forced", "guess", "expected"),
    [
        ([], [5, 6, 8, 7], [5, 6]),
        ([5, 6], [5, 6, 7, 8], [5, 6, 7]),
        ([5, 6], [5, 7], [5, 6]),
        ([5, 6], [], [5, 6]),
        ([], [], []),
    ],
)
def test_what_a_grammar_forces_comes_first_and_guesses_are_cut(
    forced: list[int], guess: list[int], expected: list[int]
) -> None:
    own, seq = speculation(lambda *_: guess, num_drafts=9), sequence()
    seq.state[CONSTRAINT] = Grammar(forced)
    assert choose(own, seq) == [expected]
    own.settle(seq, len(expected), len(forced))
    tried = len(expected) > len(forced)
    assert (own._states[seq].acceptance._times_tried[0] == 1) == tried, "nothing is learned from what is forced"


def test_tokens_in_flight_are_guessed_too_and_are_no_drafts() -> None:
    asked: list[tuple[int, int]] = []

    def say(tokens: Seq[int], most: int) -> list[int]:
        asked.append((len(tokens), most))
        return continuation(tokens, most)

    own, seq = speculation(say, num_drafts=3), sequence()
    assert own.postpone([Candidate(seq, 5, 2)], 1, 99) == {seq: continuation(seq.token_ids, 4)[2:]}
    assert (asked, own.stats.num_postponed) == ([(3, 4)], 1)
    short = speculation(lambda *_: [1, 2])
    assert not short.postpone([Candidate(seq, 5, 2)], 1, 99)
    assert short.stats.num_unknown == 1


def test_nobody_is_postponed_for_a_step_that_prompts_will_fill() -> None:
    """Under the policy "mixed", the next step most likely has as many tokens of prompts as the last one."""
    own, seq = speculation(costs=StepCosts([(16, 1.0)])), sequence()
    for num_prompt_tokens, expected in ((30, 0), (0, 1), (30, 0)):
        runs = [Run(1, 0, num_prompt_tokens, False)] if num_prompt_tokens else []
        own.complete(Step(1, StepPlan(runs=runs), decodes=[seq]))
        own.complete(Step(2, StepPlan(runs=[Run(1, 0, 16, False)])))  # it has prompts alone, and tells nothing
        assert len(own.postpone([Candidate(seq, 4, 9)], 1, 99)) == expected


@pytest.mark.parametrize("method", ["begin", "fork", "propose", "end"])
def test_a_proposer_that_fails_harms_nobody_and_is_asked_no_more(method: str) -> None:
    calls = []

    def fail(*_: object) -> Any:
        calls.append(method)
        raise RuntimeError("not today")

    own, seq = speculation(), sequence()
    setattr(proposer(own), method, fail)
    for _ in range(3):
        assert choose(own, seq) == [continuation(seq.token_ids, 4) if method == "end" else []]
    for _ in range(2):
        own.finished(seq)
    assert (calls, own.stats.num_errors) == ([method], 1)
    assert own.stats.num_unknown == (0 if method == "end" else 3)
    assert proposer(own).ended == [], "nor is it told of the end"


def test_a_prompt_is_read_once_for_all_completions_of_its_request() -> None:
    own, first, other = speculation(), sequence(salt="mine", n=3), sequence(4)
    first.token_ids += [4]
    seqs = first.request.sequences
    for _ in range(2):
        choose(own, *seqs, other)
    assert proposer(own).begun == [(first.request.prompt_token_ids, "mine"), (other.token_ids, "")]
    assert proposer(own).num_forks == 4
    for seq in (*seqs, other):
        seq.request.num_finished += 1
        own.finished(seq)
    assert proposer(own).ended == [seq.token_ids for seq in (*seqs, other)]
    assert not own._prompts
    assert not own._states


# ---- what is learned


@pytest.mark.parametrize(("say", "num_new"), [(right, 1), (wrong, 1), (wrong, 2)])
def test_a_guess_that_was_not_verified_is_compared_with_what_came(say: Say, num_new: int) -> None:
    """So a sequence has drafts again when its guesses come true, and not before."""
    own, seq = speculation(say, num_drafts=4, costs=StepCosts([(1, 1.0), (8, 5.0)])), sequence()
    choose(own, seq)
    for _ in range(15):
        own.settle(seq, 4, 0)
    found = []
    for _ in range(30):
        found += choose(own, seq)
        seq.token_ids += continuation(seq.token_ids, num_new)
    assert not found[0]
    assert any(found) == (say is right)
    assert own.stats.num_runs == 15, "which counts as no run"


def test_counters_are_a_copy_that_changes_no_more() -> None:
    own, seq = speculation(num_drafts=4, costs=StepCosts([(1, 1.0), (64, 2.0)])), sequence()
    choose(own, seq)
    own.finished(seq)
    own.settle(seq, 4, 2)  # a result may come after the end
    before = own.snapshot()
    assert (before.num_runs, before.num_drafts, before.num_accepted) == (1, 4, 2)
    assert (before.tried_at, before.accepted_at) == ([1, 1, 1, 0], [1, 1, 0, 0])
    assert before.step_seconds == ((1, 1.0), (64, 2.0))
    assert (before.acceptance_rate, before.acceptance_by_place) == (0.5, [1.0, 1.0, 0.0])
    own.settle(seq, 2, 2)
    own.costs.record(1, 5.0)
    assert (before.num_runs, before.tried_at, before.step_seconds[0]) == (1, [1, 1, 1, 0], (1, 1.0))
    assert own.snapshot().accepted_at == [2, 2, 0, 0]
    assert speculation().snapshot().acceptance_rate == 0


# ---- what steps cost


class Recorded(StepCosts):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__([(1, 1.0), (64, 1.0)])
        self.steps: list[tuple[int, float]] = []

    def record(self, num_tokens: int, seconds: float) -> None:
        self.steps.append((num_tokens, seconds))


def step(number: int, num_decodes: int, *runs: Run) -> Step:
    columns = np.zeros(num_decodes, np.int32)
    return Step(number, StepPlan(decode_rows=columns, decode_starts=columns, runs=list(runs)))


def test_a_step_takes_the_time_since_its_launch_or_since_the_step_before_it() -> None:
    times, costs = iter([10.0, 11.0, 14.0, 15.5, 17.0, 21.0, 30.0, 31.0, 32.0, 33.0, 34.0]), Recorded()
    own = speculation(costs=costs, clock=lambda: next(times))  # type: ignore[arg-type]
    drafted, prompt = Run(0, 5, 3, True, (1, 2)), Run(1, 0, 9, True)
    first, second, third = step(1, 2), step(2, 1, drafted), step(3, 1, prompt)
    own.complete(first)  # at 10
    own.complete(second)  # 11
    own.after_step(first, StepResult([]), [])  # 14: 4 seconds
    own.complete(third)  # 15.5
    own.after_step(second, StepResult([]), [])  # 17: since 14
    own.after_step(third, StepResult([]), [])  # 21: it has a prompt
    own.complete(step(4, 1))  # 30: interrupted, its end is never told
    own.complete(step(5, 1))
    own.after_step(step(5, 1), RuntimeError("injected"), [])  # 32: it failed
    dropped = step(6, 1)
    dropped.is_dropped = True
    own.complete(dropped)
    own.after_step(dropped, StepResult([]), [])
    assert costs.steps == [(2, 4.0), (4, 3.0)]
    assert not own._starts


# ---- where the runner guesses


def modelled(guess_share: float, costs: StepCosts | None = None) -> Speculation:
    costs = costs or StepCosts([(1, 1.0), (64, 1.0)])
    return Speculation(None, num_drafts=5, vocab_size=VOCAB, costs=costs, guess_share=guess_share)


@pytest.mark.parametrize(
    ("guess_share", "is_right"),
    [(0.0, lambda count: count == 5), (0.2, lambda count: 0 < count < 5), (9.0, lambda count: count == 0)],
    ids=["free", "some", "dear"],
)
def test_guesses_that_take_time_are_fewer(guess_share: float, is_right: Callable[[int], bool]) -> None:
    own, seq = modelled(guess_share), sequence()
    [drafts] = choose(own, seq)
    assert is_right(len(drafts))
    assert set(drafts) <= {UNKNOWN}
    own.finished(seq)
    assert own.stats.num_errors == 0


def test_the_time_of_guesses_is_no_time_of_their_step() -> None:
    costs = Recorded()
    own = modelled(0.5, costs)
    own.clock = iter([0.0, 6.0]).__next__
    drafted = step(1, 0, Run(0, 5, 5, True, (UNKNOWN,) * 4))
    own.complete(drafted)
    own.after_step(drafted, StepResult([]), [])
    assert costs.steps == [(5, 2.0)], "four guesses, each half a step, and the step"


def test_a_model_whose_guesses_were_wrong_is_asked_again_some_day() -> None:
    own, seq = modelled(0.3), sequence()
    while choose(own, seq)[0]:
        own.settle(seq, 5, 0)
    assert any(choose(own, seq)[0] for _ in range(300))
