"""Speculation: for which sequences a step verifies drafts, and how many.

Drafts are worth verifying as long as the tokens that are expected of a step, per second, grow with them. What they bring follows
from how the guesses for the sequence fared; what they cost, from how long steps of more tokens take. On a CPU, and with few
sequences on any device, a step mostly waits for weights, and some more tokens cost next to nothing; a full batch is different.

Whatever is decided here, the tokens are the same: see docs/speculation.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple

from nanoengine.core.messages import UNKNOWN, StepPlan, StepResult
from nanoengine.core.scheduler import Step
from nanoengine.core.sequence import Request, Sequence
from nanoengine.speculation.acceptance import SLOW_RATE, Acceptance
from nanoengine.speculation.drafter import Candidate, Drafter
from nanoengine.speculation.proposer import Proposer, SequenceProposer
from nanoengine.speculation.statistics import SpeculationStats
from nanoengine.speculation.step_costs import StepCosts

logger = logging.getLogger("nanoengine")

LEAST_GAIN = 1.02
"""Tokens per second must be expected to grow by more than this factor: less is lost in what nobody can foresee."""

CONSTRAINT = "constraint"
"""In `Sequence.state` if a grammar constrains the sequence: it says which tokens must come next (`forced`), and which drafts may
(`allowed`)."""


@dataclass(slots=True)
class _State:
    """What is kept of a sequence."""

    proposer: SequenceProposer | None  # None: it raised, or the runner guesses
    acceptance: Acceptance
    num_forced: int = 0  # drafts of the last guess that a grammar forces: nothing is learned from them
    unverified: tuple[int, list[int]] | None = None  # (first position, tokens) of a guess that no step has verified

    def chances(self, num_drafts: int) -> list[float]:
        """How likely the first of some drafts is accepted, the first two are, and so on."""
        num_forced = min(self.num_forced, num_drafts)
        return [1.0] * num_forced + self.acceptance.chances(num_drafts - num_forced)


class _Guess(NamedTuple):
    """The tokens that may stand in a sequence from position `first` on."""

    seq: Sequence
    state: _State
    first: int
    tokens: list[int]


class Speculation(Drafter):
    """Chooses drafts, and learns what steps cost and which guesses were right.

    Args:
        proposer: makes guesses; None: the runner does, and drafts are UNKNOWN here.
        num_drafts: most drafts of a sequence in a step.
        vocab_size: token ids are below it; a guess ends before anything else.
        costs: of steps by their tokens.
        guess_share: what one guess for every sequence takes of the time of a step, where the runner guesses.
        clock: seconds.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        *,
        num_drafts: int,
        vocab_size: int,
        costs: StepCosts,
        guess_share: float = 0.0,
        clock: Callable[[], float] = perf_counter,
    ):
        self.proposer, self.num_drafts, self.vocab_size = proposer, num_drafts, vocab_size
        self.costs, self.guess_share, self.clock = costs, guess_share, clock
        self.stats = SpeculationStats()
        self._prompts: dict[Request, SequenceProposer] = {}  # that have read the prompt, and nothing else
        self._states: dict[Sequence, _State] = {}
        self._typical = Acceptance(num_drafts, SLOW_RATE)  # of the sequences so far
        self._starts: dict[int, float] = {}  # number of a step in flight -> when it was scheduled
        self._last_end = float("-inf")  # of the last step
        self._num_prompt_tokens = 0  # beside the decodes of the last step that had any

    def snapshot(self) -> SpeculationStats:
        """The counters at this moment, copied."""
        stats = self.stats
        tried_at, accepted_at = stats.tried_at.copy(), stats.accepted_at.copy()
        return replace(stats, tried_at=tried_at, accepted_at=accepted_at, step_seconds=self.costs.curve)

    # ---- choosing

    def postpone(self, candidates: Iterable[Candidate], num_decodes: int, budget: int) -> Iterable[Sequence]:
        """Those of the candidates that are expected to have drafts in the next step. It will have as many tokens of prompts as
        the last one, as far as anybody knows.
        """
        num_tokens = num_decodes + self._num_prompt_tokens
        if not self.may_pay(num_decodes, num_tokens, budget - self._num_prompt_tokens):
            return ()
        chosen = self._choose(candidates, num_decodes, num_tokens, budget - self._num_prompt_tokens)
        self.stats.num_postponed += len(chosen)
        return chosen

    def choose(
        self, candidates: Iterable[Candidate], num_decodes: int, num_tokens: int, budget: int
    ) -> dict[Sequence, list[int]]:
        """The drafts of a step, for those of the candidates that have any. In a full batch no candidate is looked at."""
        if not self.may_pay(num_decodes, num_tokens, budget):
            self.stats.num_full += num_decodes
            return {}
        return self._choose(candidates, num_decodes, num_tokens, budget)

    def may_pay(self, num_decodes: int, num_tokens: int, budget: int) -> bool:
        """Whether drafts would be worth it in a step of so many other tokens if all of them were accepted."""
        rate = num_tokens / self.costs.seconds(num_tokens)
        counts = [count for count in (1, 2, 4, self.num_drafts) if count <= budget]
        return any((num_tokens + n) / self._seconds(num_tokens + n, n, num_decodes) > LEAST_GAIN * rate for n in counts)

    def _seconds(self, num_tokens: int, depth: int, num_decodes: int) -> float:
        """What a step is expected to take in which the longest run of drafts is so long, guessing included."""
        seconds = self.costs.seconds(num_tokens)
        return seconds + depth * self.guess_share * self.costs.seconds(num_decodes) if self.guess_share else seconds

    def _choose(
        self, candidates: Iterable[Candidate], num_decodes: int, num_tokens: int, budget: int
    ) -> dict[Sequence, list[int]]:
        guesses: list[_Guess] = []
        for seq, first, most in candidates:
            if not getattr(seq.params, "speculate", True):
                continue
            guess = self._guess(seq, first, min(most, self.num_drafts))
            if guess:
                guesses.append(_Guess(seq, self._states[seq], first, guess))
            else:
                self.stats.num_unknown += 1
        counts = self._worth(guesses, num_decodes, num_tokens, budget)
        chosen: dict[Sequence, list[int]] = {}
        for (seq, state, first, guess), count in zip(guesses, counts, strict=True):
            if count:
                chosen[seq] = guess[:count]
                continue
            self.stats.num_not_worth += 1
            if state.num_forced:
                continue
            if state.proposer is None:
                state.acceptance.fade()  # the runner makes no guess that is not verified: nothing is learned from it
            else:
                state.unverified = (first, guess)
        return chosen

    def _worth(self, guesses: list[_Guess], num_decodes: int, num_tokens: int, budget: int) -> list[int]:
        """How many drafts of each guess make the most tokens per second, the likeliest first."""
        chances = [
            (chance, i, place)
            for i, guess in enumerate(guesses)
            for place, chance in enumerate(guess.state.chances(len(guess.tokens)))
        ]
        # The sort is stable, so a draft never comes before the drafts that it stands behind.
        chances.sort(key=lambda draft: -draft[0])
        expected, depth = float(num_tokens), 0
        best, best_count = LEAST_GAIN * num_tokens / self.costs.seconds(num_tokens), 0
        for count, (chance, _, place) in enumerate(chances[:budget], start=1):
            expected += chance
            depth = max(depth, place + 1)
            rate = expected / self._seconds(num_tokens + count, depth, num_decodes)
            if rate > best:
                best, best_count = rate, count
        counts = [0] * len(guesses)
        for _, i, _ in chances[:best_count]:
            counts[i] += 1
        return counts

    # ---- guessing

    def _guess(self, seq: Sequence, first: int, most: int) -> list[int]:
        """The tokens that may stand in a sequence from position `first` on. Those before it are guessed too if in flight."""
        state, num_in_flight = self._states.get(seq), first - len(seq.token_ids)
        is_new = state is None
        if state is None:
            state = self._states[seq] = _State(None, Acceptance(self.num_drafts, like=self._typical))
        constraint = seq.state.get(CONSTRAINT)
        if self.proposer is None:  # masks are filled before the runner guesses
            return [UNKNOWN] * most if constraint is None else []
        if state.unverified is not None:
            self._learn_from_unverified(state, seq)
        try:
            if is_new:
                state.proposer = self._new_proposer(self.proposer, seq.request)
            guess = [] if state.proposer is None else state.proposer.propose(seq.token_ids, num_in_flight + most)
            found = self._valid(list(guess)[num_in_flight : num_in_flight + most], seq)
        except Exception as error:  # a proposer that fails must not harm the sequence
            self._give_up(state, error)
            found = []
        if constraint is None:
            return found
        forced = [] if num_in_flight else self._valid(constraint.forced(most), seq)
        state.num_forced = len(forced)
        return constraint.allowed(found) if not num_in_flight and found[: len(forced)] == forced else forced

    def _new_proposer(self, proposer: Proposer, request: Request) -> SequenceProposer:
        """A prompt is read once for all completions of a request."""
        prompt = self._prompts.get(request)
        if prompt is None:
            prompt = self._prompts[request] = proposer.begin(request.prompt_token_ids, request.cache_salt)
        return prompt.fork()

    def _valid(self, guess: list[int], seq: Sequence) -> list[int]:
        """The part of a guess that can be drafts: tokens of the vocabulary, and none that would end the sequence."""
        for place, token in enumerate(guess):
            if type(token) is not int or not 0 <= token < self.vocab_size or token in seq.stop_token_ids:
                return guess[:place]
        return guess

    def _give_up(self, state: _State, error: Exception) -> None:
        state.proposer = None
        self.stats.num_errors += 1
        logger.warning("a proposer of drafts failed; its sequence goes on without drafts: %r", error)

    # ---- learning

    def settle(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """So many of the drafts of a sequence were accepted."""
        self.stats.record(num_drafts, num_accepted)
        state = self._states.get(seq)
        if state is not None and state.num_forced <= min(num_accepted, num_drafts - 1):
            self._learn(state, num_drafts - state.num_forced, num_accepted - state.num_forced)

    def _learn(self, state: _State, num_drafts: int, num_right: int) -> None:
        for acceptance in (state.acceptance, self._typical):
            acceptance.record(num_drafts, num_right)

    def _learn_from_unverified(self, state: _State, seq: Sequence) -> None:
        """A guess that was not verified is compared with the tokens that came: if it was right, drafts become worth it again."""
        assert state.unverified is not None
        start, guess = state.unverified
        came = seq.token_ids[start : start + len(guess)]
        if came:
            pairs = zip(guess, came, strict=False)
            num_right = next((i for i, (guessed, token) in enumerate(pairs) if guessed != token), len(came))
            self._learn(state, len(came), num_right)
            state.unverified = None

    def _learn_cost(self, plan: StepPlan, seconds: float) -> None:
        """A plan took so long. Steps with prompts teach nothing."""
        num_drafted = plan.num_drafted
        if not plan.num_tokens or len(plan.runs) > num_drafted:
            return
        num_tokens, num_decodes = plan.num_tokens, len(plan.decode_rows) + num_drafted
        depth = max((len(run.drafts) for run in plan.runs), default=0)
        guessing = self._seconds(num_tokens, depth, num_decodes) / self.costs.seconds(num_tokens)
        self.costs.record(num_tokens, seconds / guessing)

    def complete(self, step: Step) -> None:
        self._starts[step.number] = self.clock()
        if step.decodes or step.plan.num_drafted:
            self._num_prompt_tokens = sum(run.num_new for run in step.plan.runs if not run.drafts)

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        end = self.clock()
        start = max(self._starts.get(step.number, end), self._last_end)  # a device computes one step at a time
        self._starts = {number: time for number, time in self._starts.items() if number > step.number}
        self._last_end = end
        if isinstance(result, StepResult) and not step.is_dropped:
            self._learn_cost(step.plan, end - start)

    def finished(self, seq: Sequence) -> None:
        state = self._states.pop(seq, None)
        if state is not None and state.proposer is not None:
            try:
                state.proposer.end(seq.token_ids)
            except Exception as error:
                self._give_up(state, error)
        if seq.request.finished:
            self._prompts.pop(seq.request, None)
