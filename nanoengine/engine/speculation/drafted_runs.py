"""DraftedRuns: the sequences whose drafts are being verified. They are out of the decodes until the results are there.

A run of k drafts computes k + 1 tokens and samples behind each. All of them count as computed and as the sequence's own while the
plan is on its way; then the counts go back by what was rejected. So a sequence is in one such plan at a time, while others are
decoded in the plans behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from nanoengine.engine.decode_set import DecodeSet
from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.messages import UNKNOWN, Drafted, StepResult
from nanoengine.engine.outbox import Outbox
from nanoengine.engine.sequence import Sequence
from nanoengine.engine.speculation.speculation import Candidate, Speculation
from nanoengine.outputs import TokenLogprobs

if TYPE_CHECKING:
    from nanoengine.engine.scheduler import InFlight


class Sampled(NamedTuple):
    """The samples of a plan that are tokens of their sequences, in the order of the plan; a sequence may have several."""

    seqs: list[Sequence]
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]  # number of the sample, among these -> of those that asked


class DraftedRuns:
    """Puts runs with drafts into plans, and takes their results.

    Args:
        speculation: says which drafts are worth verifying.
        most_new: most tokens of a sequence in one step.
    """

    def __init__(
        self,
        speculation: Speculation,
        decodes: DecodeSet,
        block_manager: BlockManager,
        outbox: Outbox,
        most_new: int,
    ):
        self.speculation = speculation
        self.most_new = most_new
        self._decodes, self._block_manager, self._outbox = decodes, block_manager, outbox
        self.verifying: set[Sequence] = set()  # in a plan on its way
        # In no plan until their last tokens have come: then a guess is to be verified.
        self.postponed: set[Sequence] = set()

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self.verifying or seq in self.postponed

    def remove(self, seq: Sequence) -> None:
        """It runs no longer."""
        self.verifying.discard(seq)
        self.postponed.discard(seq)

    # ---- making a plan

    def postpone(self, budget: int) -> None:
        """Leave those out of a plan whose last tokens are on their way, and whose guesses are worth verifying in the next.

        They must not be given blocks before: a plan has nothing for those whom it does not compute.
        """
        if self._may_pay(budget):
            for seq in self._choose(budget, are_known=False):
                self._decodes.remove(seq)
                self.postponed.add(seq)
                self.speculation.stats.num_postponed += 1

    def take(self, step: InFlight, budget: int) -> None:
        """Give drafts to those of the decodes for which that is worth it; each has room for its next token already.

        Nobody gives way for drafts: they take blocks that nobody is using, though these may be cached.
        """
        if not self._may_pay(budget):
            self.speculation.stats.num_full += len(self._decodes)
            return
        for seq, drafts in self._choose(budget, are_known=True).items():
            if seq.num_slots < seq.num_tokens + len(drafts):
                step.plan.tables += self._block_manager.allocate_slots(seq, len(drafts)) or []
                del drafts[seq.num_slots - seq.num_tokens :]
            if drafts:
                self._decodes.remove(seq)
                step.plan.drafted.append(Drafted(seq.row, seq.num_computed_tokens, tuple(drafts)))
                step.drafted.append(seq)
                seq.num_tokens += 1 + len(drafts)
                seq.num_computed_tokens += 1 + len(drafts)
                self.verifying.add(seq)

    def _may_pay(self, budget: int) -> bool:
        """In a full batch nobody is looked at."""
        return self.speculation.may_pay(len(self._decodes), budget)

    def _choose(self, budget: int, *, are_known: bool) -> dict[Sequence, list[int]]:
        """Drafts for some of the decodes, those whose tokens are all known or the others."""
        candidates = [
            candidate
            for candidate in self._candidates()
            if (candidate.seq.num_known_tokens == candidate.seq.num_tokens) == are_known
        ]
        return self.speculation.choose(candidates, len(self._decodes), budget)

    def _candidates(self) -> Iterator[Candidate]:
        for seq in self._decodes.members():
            # With `most` drafts all accepted it has its last token. Whoever makes masks must see each token before the next.
            most = min(seq.max_num_tokens - seq.num_tokens, self.most_new) - 1
            if most > 0 and seq.params.speculate and not seq.in_lockstep and seq not in self._outbox.masks:
                yield Candidate(seq, most)

    # ---- after the step

    def settle(self, step: InFlight, result: StepResult) -> Sampled:
        """Take back what was rejected, and let the sequences go on."""
        plan, tokens, logprobs = step.plan, result.token_ids, result.logprobs
        first = len(step.decoded)
        seqs, kept = step.decoded.copy(), list(range(first))
        for seq, run, num_accepted in zip(step.drafted, plan.drafted, result.num_accepted, strict=True):
            samples = tokens[first : first + run.num_new]
            ends = (i for i, token in enumerate(samples[:num_accepted], start=1) if token in seq.stop_token_ids)
            count = next(ends, num_accepted + 1)  # what was accepted behind an end is nobody's
            seqs += [seq] * count
            kept += range(first, first + count)
            first += run.num_new
            if not seq.finished:
                self.speculation.settle(seq, len(run.drafts), num_accepted)
                self._take_back(seq, run.num_new - count, samples)
        seqs += step.sampled
        kept += range(first, len(tokens))
        numbers = {number: i for i, number in enumerate(kept)}
        asked = {numbers[number]: entries for number, entries in logprobs.items() if number in numbers}
        return Sampled(seqs, [tokens[number] for number in kept], asked)

    def _take_back(self, seq: Sequence, num_rejected: int, samples: list[int]) -> None:
        """Count as if the rejected tokens had never been. What has no finite logits may have K/V that is no number."""
        seq.num_tokens -= num_rejected
        if seq in self.verifying:  # and was not preempted since
            self.verifying.remove(seq)
            seq.num_computed_tokens -= num_rejected
            self._block_manager.trim(seq, wipe=UNKNOWN in samples)
            self._decodes.add(seq)

    def wake(self) -> None:
        """Results were taken: whoever waits for no more of them is decoded again."""
        for seq in [seq for seq in self.postponed if seq.num_known_tokens == seq.num_tokens]:
            self.postponed.remove(seq)
            self._decodes.add(seq)
