"""Speculation: for which sequences a step verifies drafts, and how many.

Drafts are worth verifying as long as the tokens that are expected of a step, per second, grow with them. What they bring follows
from how the guesses for the sequence fared; what they cost, from how long steps of more tokens take. On a CPU, and with few
sequences on any device, a step mostly waits for weights, and some more tokens cost next to nothing; a full batch is different.

Whatever is decided here, the tokens are the same: see docs/speculation.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nanoengine.engine.messages import UNKNOWN, StepPlan
from nanoengine.engine.sequence import Sequence
from nanoengine.engine.speculation.acceptance import SLOW_RATE, Acceptance
from nanoengine.engine.speculation.proposer import Guesser, Proposer
from nanoengine.engine.speculation.step_costs import StepCosts

logger = logging.getLogger("nanoengine")

LEAST_GAIN = 1.02
"""Tokens per second must be expected to grow by more than this factor: less is lost in what nobody can foresee."""


@dataclass(slots=True)
class SpeculationStats:
    """What became of guesses, over the engine's life. A sequence of a step counts once in one of the first four."""

    num_runs: int = 0  # drafts were verified
    num_unknown: int = 0  # no guess was made
    num_not_worth: int = 0  # there was a guess, but drafts were expected to cost more than they bring
    num_full: int = (
        0  # nobody was asked: with so many tokens in a step, or with guesses that take so long, no draft could pay
    )
    num_postponed: int = (
        0  # times that a sequence was left out of a step, so that its guess could be verified in the next
    )
    num_drafts: int = 0  # that were verified
    num_accepted: int = 0  # of them: steps that their sequences were saved
    num_errors: int = 0  # guessers that raised; their sequences go on without
    tried_at: list[int] = field(
        default_factory=list
    )  # of each place in a run: drafts there, where all before were accepted
    accepted_at: list[int] = field(default_factory=list)
    step_seconds: tuple[tuple[int, float], ...] = ()  # (tokens, seconds of such a step), as known by now

    @property
    def acceptance_rate(self) -> float:
        """Share of the verified drafts that were accepted."""
        return self.num_accepted / self.num_drafts if self.num_drafts else 0.0

    @property
    def acceptance_by_place(self) -> list[float]:
        """Of each place in a run, the share of the drafts that were accepted, where all before them were."""
        pairs = zip(self.accepted_at, self.tried_at, strict=True)
        return [accepted / tried for accepted, tried in pairs if tried]  # places that were tried are the first ones

    def record(self, num_drafts: int, num_accepted: int) -> None:
        self.num_runs += 1
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        for counts in (self.tried_at, self.accepted_at):
            counts += [0] * (num_drafts - len(counts))
        for place in range(min(num_accepted + 1, num_drafts)):
            self.tried_at[place] += 1
            self.accepted_at[place] += place < num_accepted


class Candidate(NamedTuple):
    """A sequence that may have drafts."""

    seq: Sequence
    most: int  # drafts that it has room for, at least 1


@dataclass(slots=True)
class _State:
    """What is kept of a sequence."""

    guesser: Guesser | None  # None: it raised, or whoever computes the steps guesses
    acceptance: Acceptance
    unasked: tuple[int, list[int]] | None = None  # a guess that was not verified, behind so many tokens


class Speculation:
    """Chooses drafts.

    Args:
        proposer: makes guesses; None: whoever computes the steps does, and drafts are UNKNOWN here.
        num_drafts: most drafts of a sequence in a step.
        vocab_size: token ids are below it; what a guesser says beyond is dropped.
        costs: of steps by their tokens.
        guess_share: what one guess for every sequence takes of the time of a step, where whoever computes the steps guesses.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        *,
        num_drafts: int,
        vocab_size: int,
        costs: StepCosts,
        guess_share: float = 0.0,
    ):
        self.proposer, self.num_drafts, self.vocab_size = proposer, num_drafts, vocab_size
        self.costs, self.guess_share = costs, guess_share
        self.stats = SpeculationStats()
        self._states: dict[Sequence, _State] = {}
        self._typical = Acceptance(num_drafts, SLOW_RATE)  # of the sequences so far

    def snapshot(self) -> SpeculationStats:
        """The counters at this moment, copied."""
        return replace(
            self.stats,
            tried_at=self.stats.tried_at.copy(),
            accepted_at=self.stats.accepted_at.copy(),
            step_seconds=self.costs.curve,
        )

    # ---- choosing

    def choose(self, candidates: Iterable[Candidate], num_tokens: int, budget: int) -> dict[Sequence, list[int]]:
        """The drafts of a step, for those of the candidates that have any.

        Args:
            candidates: sequences that the step decodes. Tokens of theirs that are on their way are guessed, too.
            num_tokens: of the step without drafts.
            budget: most drafts of all.
        """
        guesses: list[tuple[Sequence, list[int]]] = []
        for seq, most in candidates:
            guess = self._guess(seq, min(most, self.num_drafts))
            if guess:
                guesses.append((seq, guess))
            else:
                self.stats.num_unknown += 1
        counts = self._worth(guesses, num_tokens, budget)
        chosen: dict[Sequence, list[int]] = {}
        for (seq, guess), count in zip(guesses, counts, strict=True):
            if count:
                chosen[seq] = guess[:count]
            else:
                self.stats.num_not_worth += 1
                if self._states[seq].guesser is None:
                    self._states[seq].acceptance.fade()  # what it would have been, nobody finds out
                else:
                    self._states[seq].unasked = (seq.num_tokens, guess)
        return chosen

    def may_pay(self, num_tokens: int, budget: int) -> bool:
        """Whether drafts would be worth it in a step of so many other tokens if all of them were accepted."""
        rate = num_tokens / self._seconds(num_tokens, 0, num_tokens)
        counts = [count for count in (1, 2, 4, self.num_drafts) if count <= budget]
        return any((num_tokens + n) / self._seconds(num_tokens + n, n, num_tokens) > LEAST_GAIN * rate for n in counts)

    def _seconds(self, num_tokens: int, depth: int, num_seqs: int) -> float:
        """What a step is expected to take in which the longest run of drafts is so long, guessing included."""
        seconds = self.costs.seconds(num_tokens)
        return seconds + depth * self.guess_share * self.costs.seconds(num_seqs) if self.guess_share else seconds

    def _worth(self, guesses: list[tuple[Sequence, list[int]]], num_tokens: int, budget: int) -> list[int]:
        """How many drafts of each guess make the most tokens per second, the likeliest first."""
        chances = [
            (chance, i, place)
            for i, (seq, guess) in enumerate(guesses)
            for place, chance in enumerate(self._states[seq].acceptance.chances(len(guess)))
        ]
        # No draft comes before those that it stands behind: the order of equals is kept.
        chances.sort(key=lambda draft: -draft[0])
        expected, depth = float(num_tokens), 0
        best, best_count = LEAST_GAIN * num_tokens / self._seconds(num_tokens, 0, num_tokens), 0
        for count, (chance, _, place) in enumerate(chances[:budget], start=1):
            expected += chance
            depth = max(depth, place + 1)
            rate = expected / self._seconds(num_tokens + count, depth, num_tokens)
            if rate > best:
                best, best_count = rate, count
        counts = [0] * len(guesses)
        for _, i, _ in chances[:best_count]:
            counts[i] += 1
        return counts

    def _guess(self, seq: Sequence, most: int) -> list[int]:
        state = self._states.get(seq)
        if state is None:
            state = self._states[seq] = _State(None, Acceptance(self.num_drafts, like=self._typical))
            if self.proposer is not None:
                try:
                    state.guesser = self.proposer.begin(seq.num_prompt_tokens, seq.cache_salt)
                except Exception as error:  # a guess is a favour: whoever fails at it must not harm the sequence
                    self._give_up(state, error)
        if self.proposer is None:
            return [UNKNOWN] * most
        if state.guesser is None:
            return []
        if state.unasked is not None:
            self._learn_from_unasked(state, seq)
        num_on_their_way = seq.num_tokens - seq.num_known_tokens
        try:
            guess = state.guesser.guess(seq.token_ids, num_on_their_way + most)
            return self._sound(guess, num_on_their_way, most, seq.stop_token_ids)
        except Exception as error:  # as above
            self._give_up(state, error)
            return []

    def _sound(self, guess: Iterable[int], skip: int, most: int, ends: frozenset[int]) -> list[int]:
        """The part of a guess that can be a run of drafts. Nothing follows an end."""
        sound: list[int] = []
        for token in list(guess)[skip : skip + most]:
            if type(token) is not int or not 0 <= token < self.vocab_size or token in ends:
                break
            sound.append(token)
        return sound

    # ---- learning

    def note_seconds(self, plan: StepPlan, seconds: float) -> None:
        """A plan took so long."""
        if not plan.computes or plan.chunks:
            return
        num_tokens, num_seqs = plan.num_new_tokens, len(plan.decodes.rows) + len(plan.drafted)
        depth = max((len(run.drafts) for run in plan.drafted), default=0)
        guessing = self._seconds(num_tokens, depth, num_seqs) / self._seconds(num_tokens, 0, num_seqs)
        self.costs.record(num_tokens, seconds / guessing)

    def settle(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """So many of the drafts of a sequence were accepted."""
        self.stats.record(num_drafts, num_accepted)
        if (state := self._states.get(seq)) is not None:
            self._learn(state, num_drafts, num_accepted)

    def _learn(self, state: _State, num_drafts: int, num_right: int) -> None:
        for acceptance in (state.acceptance, self._typical):
            acceptance.record(num_drafts, num_right)

    def _learn_from_unasked(self, state: _State, seq: Sequence) -> None:
        """A guess that was not verified is compared with what came: that is how a sequence comes to have drafts again."""
        assert state.unasked is not None
        start, guess = state.unasked
        came = seq.token_ids[start : start + len(guess)]
        if not came:
            return
        num_right = next((i for i, (a, b) in enumerate(zip(guess, came, strict=False)) if a != b), len(came))
        self._learn(state, len(came), num_right)
        state.unasked = None

    def end(self, seq: Sequence) -> None:
        """A sequence has ended."""
        state = self._states.pop(seq, None)
        if state is not None and state.guesser is not None:
            try:
                state.guesser.end(seq.token_ids)
            except Exception as error:  # as above
                self._give_up(state, error)

    def _give_up(self, state: _State, error: Exception) -> None:
        state.guesser = None
        self.stats.num_errors += 1
        logger.warning("a guesser of tokens failed; its sequence goes on without guesses: %r", error)
