"""SpeculationStats: counts of drafts, verified and accepted."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoengine.features.statistics import Statistics, metric


@dataclass(slots=True)
class SpeculationStats(Statistics):
    """Counts of drafts over the engine's life. A sequence of a step counts once in one of the first three."""

    num_runs: int = metric("vllm:spec_decode_num_drafts", "Runs of drafts that were verified.")
    num_unknown: int = 0  # no draft was proposed
    num_full: int = 0  # the step had no tokens left for its drafts
    num_postponed: int = 0  # times that a sequence was left out of a step, so that the next could verify a draft
    num_drafts: int = metric("vllm:spec_decode_num_draft_tokens", "Drafts that were verified.")
    num_accepted: int = metric("vllm:spec_decode_num_accepted_tokens", "Drafts that were accepted.")  # steps saved
    num_errors: int = 0  # proposers that raised; their sequences go on without
    tried_at: list[int] = field(default_factory=list)  # by position in a run: drafts with all before accepted
    accepted_at: list[int] = field(default_factory=list)

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """A run with so many drafts was verified."""
        self.num_runs += 1
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        for counts in (self.tried_at, self.accepted_at):
            counts += [0] * (num_drafts - len(counts))
        for position in range(min(num_accepted + 1, num_drafts)):
            self.tried_at[position] += 1
            self.accepted_at[position] += position < num_accepted
