"""Drafter: adds drafts to a step, and leaves sequences out of a step so that the next one can verify their drafts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from nanoengine.core.messages import Run, StepResult
from nanoengine.core.scheduler import Scheduler, Step
from nanoengine.core.seams import PolicyPart, call_part
from nanoengine.core.sequence import Phase, Sequence


class Candidate(NamedTuple):
    """A decode that may have drafts."""

    seq: Sequence
    first: int  # the position of its first draft
    most: int  # largest number of drafts, at least 1


class Drafter(PolicyPart):
    """The policy's part of drafts. It cannot change a token, only the number of tokens in a step.

    A subclass chooses sequences and drafts (`postpone`, `choose`). Drafts use free blocks; no sequence is preempted for one.
    """

    @abstractmethod
    def postpone(self, candidates: Iterable[Candidate], num_decodes: int, budget: int) -> Iterable[Sequence]:
        """The candidates, whose last token is in flight, that are left out of a step, so that the next one can verify drafts
        behind that token. The step would have `num_decodes` decodes; the next one may have `budget` drafts.
        """

    @abstractmethod
    def choose(
        self, candidates: Iterable[Candidate], num_decodes: int, num_tokens: int, budget: int
    ) -> dict[Sequence, list[int]]:
        """The drafts of a step, at most `budget` in all.

        Args:
            candidates: its decodes whose tokens are all known, computed lazily.
            num_decodes: in the step.
            num_tokens: that the step has without drafts: decodes, and tokens of prompts.
        """

    def settle(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Note the verification of drafts of a sequence."""

    def postponed(self, scheduler: Scheduler) -> Iterable[Sequence]:
        decoding = [seq for seq in scheduler.running if seq.phase is Phase.DECODING]
        unknown = (
            Candidate(seq, seq.num_tokens, most)
            for seq in decoding
            if not seq.has_all_tokens and (most := seq.max_num_tokens - seq.num_tokens - 1) > 0
        )
        return self.postpone(unknown, len(decoding), scheduler.max_num_batched_tokens - len(decoding))

    def draft(self, scheduler: Scheduler, step: Step) -> None:
        num_tokens = len(step.decodes) + sum(run.num_new for run in step.plan.runs)
        known = (
            Candidate(seq, seq.num_computed, most)
            for seq in step.decodes
            if len(seq.token_ids) == seq.num_computed and (most := seq.max_num_tokens - seq.num_tokens) > 0
        )
        budget = scheduler.max_num_batched_tokens - num_tokens
        for part in scheduler.active:
            budget = call_part(step.faults, part, "max_drafts", budget, num_tokens, budget)
        drafted: list[tuple[Sequence, Run]] = []
        for seq, drafts in self.choose(known, len(step.decodes), num_tokens, budget).items():
            scheduler.blocks.grow(seq, seq.num_computed + len(drafts), step.plan.tables)
            drafts = drafts[: seq.num_slots - seq.num_computed]
            if not drafts:
                continue
            drafted.append((seq, Run(seq.row, seq.num_computed - 1, 1 + len(drafts), True, tuple(drafts))))
            seq.num_computed += len(drafts)
            seq.num_tokens += len(drafts)
            seq.phase = Phase.VERIFYING
        if drafted:
            drafted.sort(key=lambda item: -item[1].num_new)  # a draft model makes the next drafts of the first ones
            step.decodes = [seq for seq in step.decodes if seq.phase is not Phase.VERIFYING]
            step.runs[:0] = [seq for seq, _ in drafted]
            step.plan.runs[:0] = [run for _, run in drafted]

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        if isinstance(result, StepResult) and not step.is_dropped:
            for seq, run, num_accepted in zip(step.runs, step.plan.runs, result.num_accepted, strict=False):
                self.settle(seq, len(run.drafts), num_accepted)


def until_end(drafts: list[int], seq: Sequence, vocab_size: int) -> list[int]:
    """The drafts before the first that is no token of the model or ends the sequence: nothing can follow it."""
    for index, token in enumerate(drafts):
        if type(token) is not int or not 0 <= token < vocab_size or token in seq.stop_token_ids:
            return drafts[:index]
    return drafts
