"""Speculation: the choice of the sequences of a step that have drafts, and of the number of drafts.

Up to some number of tokens the time of a step is mostly that of reading weights, and one more token costs little; beyond it, each
token costs computation. So drafts fill a step up to that number (`STEP_TOKENS`). A sequence gets at most twice as many drafts as
its last drafted step made tokens. The choice does not depend on a clock: the same requests always have the same drafts.

The tokens do not depend on this choice: see docs/speculation.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from nanoengine.core.messages import UNKNOWN
from nanoengine.core.scheduler import Step
from nanoengine.core.sequence import Request, Sequence
from nanoengine.features.draft_constraint import CONSTRAINT
from nanoengine.features.speculation.drafter import Candidate, Drafter, until_end
from nanoengine.features.speculation.proposer import Proposer, SequenceProposer
from nanoengine.features.speculation.statistics import SpeculationStats

logger = logging.getLogger("nanoengine")

STEP_TOKENS = {"cpu": 32, "cuda": 256}
"""Tokens beyond which a step has no drafts, by the type of device."""

FIRST_DRAFTS = 4
"""Most drafts of a sequence without drafts before."""


@dataclass(slots=True)
class _State:
    """The proposer of a sequence, and the limit of its next drafts."""

    proposer: SequenceProposer | None  # None: it raised, or the runner makes drafts
    most: int = FIRST_DRAFTS  # drafts in the next step, beside those that a grammar forces
    num_forced: int = 0  # first of the last drafts, forced by a grammar: they are no measure of the proposer


class Speculation(Drafter):
    """Chooses drafts, and counts accepted ones.

    Args:
        proposer: makes drafts; None: the runner does, and drafts are UNKNOWN here.
        num_drafts: most drafts of a sequence in a step.
        vocab_size: of the model; drafts end before any other value.
        step_tokens: most tokens of a step with drafts.
    """

    def __init__(self, proposer: Proposer | None, *, num_drafts: int, vocab_size: int, step_tokens: int):
        self.proposer, self.num_drafts = proposer, num_drafts
        self.vocab_size, self.step_tokens = vocab_size, step_tokens
        self.stats = SpeculationStats()
        self._prompts: dict[Request, SequenceProposer] = {}  # that have read only the prompt
        self._states: dict[Sequence, _State] = {}
        self._num_prompt_tokens = 0  # beside the decodes of the last step that had any

    # ---- choosing

    def postpone(self, candidates: Iterable[Candidate], num_decodes: int, budget: int) -> Iterable[Sequence]:
        """The candidates that are expected to have drafts in the next step, if that has as many tokens of prompts as the last
        one.
        """
        prompts = self._num_prompt_tokens
        chosen = self._choose(candidates, min(budget - prompts, self.step_tokens - num_decodes - prompts))
        self.stats.num_postponed += len(chosen)
        return chosen

    def choose(
        self, candidates: Iterable[Candidate], num_decodes: int, num_tokens: int, budget: int
    ) -> dict[Sequence, list[int]]:
        """The drafts of a step, by sequence. In a full step no candidate is examined."""
        room = min(budget, self.step_tokens - num_tokens)
        if room <= 0:
            self.stats.num_full += num_decodes
        return self._choose(candidates, room)

    def _choose(self, candidates: Iterable[Candidate], room: int) -> dict[Sequence, list[int]]:
        """At most `room` drafts in all: the first ones of all sequences, then the second ones, and so on."""
        if room <= 0:
            return {}
        guesses: dict[Sequence, list[int]] = {}
        for seq, first, most in candidates:
            if not getattr(seq.params, "speculate", True):
                continue
            guess = self._guess(seq, first, min(most, self.num_drafts))
            if guess:
                guesses[seq] = guess
            else:
                self.stats.num_unknown += 1
        chosen: dict[Sequence, list[int]] = {}
        for depth in range(self.num_drafts):
            for seq, guess in guesses.items():
                if depth < len(guess) and room > 0:
                    chosen.setdefault(seq, []).append(guess[depth])
                    room -= 1
        self.stats.num_full += len(guesses) - len(chosen)
        return chosen

    # ---- drafts of one sequence

    def _guess(self, seq: Sequence, first: int, most: int) -> list[int]:
        """The drafts of a sequence from position `first` on. Tokens in flight before it are drafted, too, and dropped."""
        state, num_in_flight = self._states.get(seq), first - len(seq.token_ids)
        is_new = state is None
        if state is None:
            state = self._states[seq] = _State(None)
        constraint = seq.state.get(CONSTRAINT)
        if self.proposer is None:  # masks are filled before the runner makes drafts
            return [UNKNOWN] * min(most, state.most) if constraint is None else []
        try:
            if is_new:
                state.proposer = self._new_proposer(self.proposer, seq.request)
            guess = [] if state.proposer is None else state.proposer.propose(seq.token_ids, num_in_flight + most)
            drafts = until_end(list(guess)[num_in_flight : num_in_flight + most], seq, self.vocab_size)
        except Exception as error:
            state.proposer, drafts = None, []
            self.stats.num_errors += 1
            logger.warning("a proposer of drafts failed; its sequence goes on without drafts: %r", error)
        if constraint is not None:
            forced = [] if num_in_flight else until_end(constraint.forced(most), seq, self.vocab_size)
            state.num_forced = len(forced)
            drafts = constraint.allowed(drafts) if not num_in_flight and drafts[: len(forced)] == forced else forced
        return drafts[: state.num_forced + state.most]

    def _new_proposer(self, proposer: Proposer, request: Request) -> SequenceProposer:
        """A prompt is read once for all completions of a request."""
        prompt = self._prompts.get(request)
        if prompt is None:
            prompt = self._prompts[request] = proposer.begin(request.prompt_token_ids)
        return prompt.fork()

    # ---- outcomes

    def settle(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        self.stats.record(num_drafts, num_accepted)
        state = self._states.get(seq)
        if state is not None and state.num_forced <= min(num_accepted, num_drafts - 1):
            state.most = 2 * (num_accepted - state.num_forced + 1)

    def complete(self, step: Step) -> None:
        if step.decodes or step.plan.num_drafted:
            self._num_prompt_tokens = sum(run.num_new for run in step.plan.runs if not run.drafts)

    def finished(self, seq: Sequence) -> None:
        self._states.pop(seq, None)
        if seq.request.finished:
            self._prompts.pop(seq.request, None)
