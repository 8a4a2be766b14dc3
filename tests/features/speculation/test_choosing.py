"""Which drafts a step verifies."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from nanoengine.core.messages import UNKNOWN, Run, StepPlan
from nanoengine.core.scheduler import Step
from nanoengine.core.sequence import Sequence
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.features.speculation.drafter import Candidate
from nanoengine.features.speculation.speculation import CONSTRAINT, Speculation
from tests.core.toys import VOCAB
from tests.features.speculation.scripted import Scripted, continuation, sequence, speculation


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


@pytest.mark.parametrize(("most", "budget", "expected"), [(99, 99, 3), (2, 99, 2), (99, 2, 2), (99, 1, 1)])
def test_drafts_are_as_many_as_there_is_room_for(most: int, budget: int, expected: int) -> None:
    seq = sequence()
    own = speculation(num_drafts=3)
    assert choose(own, seq, most=most, budget=budget) == [continuation(seq.token_ids, expected)]


@pytest.mark.parametrize(("step_tokens", "budget"), [(2, 99), (99, 0)])
def test_in_a_full_step_no_candidate_is_looked_at(step_tokens: int, budget: int) -> None:
    own = speculation(step_tokens=step_tokens)
    candidates = iter([Candidate(sequence(), 3, 9), Candidate(sequence(), 3, 9)])
    assert own.choose(candidates, 2, 2, budget) == {}
    assert not own.postpone(candidates, 2, budget)
    assert len(list(candidates)) == 2
    assert (own.stats.num_full, own.stats.num_postponed) == (2, 0)


def test_the_room_of_a_step_is_shared_out_place_by_place() -> None:
    """Tokens of prompts take room too."""
    own, seqs = speculation(step_tokens=8), [sequence() for _ in range(3)]
    assert list(map(len, choose(own, *seqs))) == [2, 2, 1]
    assert list(map(len, choose(own, *seqs, others=3))) == [1, 1, 0]
    assert list(map(len, choose(own, *seqs, others=5))) == [0, 0, 0]
    assert own.stats.num_full == 1 + 3


def test_the_next_drafts_are_at_most_twice_the_tokens_that_the_last_ones_made() -> None:
    own, seq, other = speculation(num_drafts=15), sequence(), sequence(4)
    for expected, num_accepted in ((4, 4), (10, 10), (15, 15), (15, 2), (6, 0), (2, 0), (2, 1), (4, 3)):
        [drafts] = choose(own, seq)
        assert len(drafts) == expected
        own.settle(seq, len(drafts), num_accepted)
    assert list(map(len, choose(own, seq, other))) == [8, 4], "each by its own drafts"


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
    assert own.stats.num_unknown == own.stats.num_full == 0


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
    assert own._states[seq].most == (2 if tried else 4), "tokens that are forced say nothing about guesses"


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
    own, seq = speculation(step_tokens=16), sequence()
    for num_prompt_tokens, expected in ((30, 0), (0, 1), (30, 0)):
        runs = [Run(1, 0, num_prompt_tokens, False)] if num_prompt_tokens else []
        own.complete(Step(1, StepPlan(runs=runs), decodes=[seq]))
        own.complete(Step(2, StepPlan(runs=[Run(1, 0, 16, False)])))  # it has prompts alone, and tells nothing
        assert len(own.postpone([Candidate(seq, 4, 9)], 1, 99)) == expected


@pytest.mark.parametrize("method", ["begin", "fork", "propose"])
def test_a_proposer_that_fails_harms_nobody_and_is_asked_no_more(method: str) -> None:
    calls = []

    def fail(*_: object) -> Any:
        calls.append(method)
        raise RuntimeError("not today")

    own, seq = speculation(), sequence()
    setattr(proposer(own), method, fail)
    for _ in range(3):
        assert choose(own, seq) == [[]]
    assert (calls, own.stats.num_errors, own.stats.num_unknown) == ([method], 1, 3)


def test_a_prompt_is_read_once_for_all_completions_of_its_request() -> None:
    own, first, other = speculation(), sequence(n=3), sequence(4)
    first.token_ids += [4]
    seqs = first.request.sequences
    for _ in range(2):
        choose(own, *seqs, other)
    assert proposer(own).begun == [first.request.prompt_token_ids, other.token_ids]
    assert proposer(own).num_forks == 4
    for seq in (*seqs, other):
        seq.request.num_finished += 1
        own.finished(seq)
    assert not own._prompts
    assert not own._states


# ---- what became of drafts


def test_drafts_are_counted_by_their_places_in_runs() -> None:
    own, seq = speculation(num_drafts=4), sequence()
    choose(own, seq)
    own.finished(seq)
    own.settle(seq, 4, 2)  # a result may come after the end
    stats = own.stats
    assert (stats.num_runs, stats.num_drafts, stats.num_accepted) == (1, 4, 2)
    assert (stats.tried_at, stats.accepted_at) == ([1, 1, 1, 0], [1, 1, 0, 0])
    own.settle(seq, 2, 2)
    assert stats.accepted_at == [2, 2, 0, 0]


def test_a_model_that_guesses_is_asked_for_as_many_drafts_as_a_proposer() -> None:
    own, seq = Speculation(None, num_drafts=15, vocab_size=VOCAB, step_tokens=32), sequence()
    for expected, num_accepted in ((4, 4), (10, 0), (2, 0), (2, 2)):
        assert choose(own, seq) == [[UNKNOWN] * expected]
        own.settle(seq, expected, num_accepted)
    assert own.stats.num_errors == 0
