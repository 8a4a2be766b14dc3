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
from nanoengine.engine.messages import Drafted, Entries, StepResult
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
        untold: changes of tables of sequences, until a plan that computes them.
        most_new: most tokens of a sequence in one step.
    """

    def __init__(
        self,
        speculation: Speculation,
        decodes: DecodeSet,
        block_manager: BlockManager,
        outbox: Outbox,
        untold: dict[Sequence, list[Entries]],
        most_new: int,
    ):
        self.speculation = speculation
        self.most_new = most_new
        self._decodes, self._block_manager, self._outbox, self._untold = decodes, block_manager, outbox, untold
        self.verifying: set[Sequence] = set()  # in a plan on its way
        self.postponed: set[Sequence] = (
            set()
        )  # in no plan until their last tokens have come: then a guess is to be verified

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self.verifying or seq in self.postponed

    def remove(self, seq: Sequence) -> None:
        """It runs no longer."""
        self.verifying.discard(seq)
        self.postponed.discard(seq)

    # ---- making a plan

    def take(self, step: InFlight, budget: int) -> None:
        """Give drafts to those of the decodes for which that is worth it; each has room for its next token already.

        Drafts take blocks that are free, and nobody gives way for them.
        """
        num_tokens = len(self._decodes)
        if not self.speculation.may_pay(num_tokens, budget):  # in a full batch nobody is looked at
            self.speculation.stats.num_full += num_tokens
            return
        chosen = self.speculation.choose(self._candidates(), num_tokens, budget)
        for seq, drafts in chosen.items():
            if seq.num_known_tokens < seq.num_tokens:
                self._postpone(step, seq)
                continue
            if seq.num_slots < seq.num_tokens + len(drafts):
                changes = self._block_manager.allocate_slots(seq, len(drafts))
                step.plan.tables += changes or []
                del drafts[seq.num_slots - seq.num_tokens :]
            if drafts:
                self._decodes.remove(seq)
                step.plan.drafted.append(Drafted(seq.row, seq.num_computed_tokens, tuple(drafts)))
                step.drafted.append(seq)
                seq.num_tokens += 1 + len(drafts)
                seq.num_computed_tokens += 1 + len(drafts)
                self.verifying.add(seq)

    def _postpone(self, step: InFlight, seq: Sequence) -> None:
        """Leave a sequence out of a plan, which must then tell nothing of it."""
        own = [entries for entries in step.plan.tables if entries.row == seq.row]
        if own:
            step.plan.tables = [entries for entries in step.plan.tables if entries.row != seq.row]
            self._untold[seq] = own
        self._decodes.remove(seq)
        self.postponed.add(seq)
        self.speculation.stats.num_postponed += 1

    def _candidates(self) -> Iterator[Candidate]:
        for seq in self._decodes.seqs:
            # With `most` drafts all accepted it has its last token. Whoever makes masks must see each token before the next.
            most = min(seq.max_num_tokens - seq.num_tokens, self.most_new) - 1
            is_free = seq.params.speculate and not seq.in_lockstep and seq not in self._outbox.masks
            if seq.decoding and most > 0 and is_free:
                yield Candidate(seq, most)

    # ---- after the step

    def settle(self, step: InFlight, result: StepResult) -> Sampled:
        """Take back what was rejected, and let the sequences go on."""
        plan, tokens, logprobs = step.plan, result.token_ids, result.logprobs
        first = len(step.decoded)
        seqs, kept = step.decoded.copy(), list(range(first))
        for seq, run, num_accepted in zip(step.drafted, plan.drafted, result.num_accepted, strict=True):
            count = num_accepted + 1
            seqs += [seq] * count
            kept += range(first, first + count)
            first += run.num_new
            if not seq.finished:
                self.speculation.settle(seq, len(run.drafts), num_accepted)
                self._take_back(seq, run.num_new - count)
        seqs += step.sampled
        kept += range(first, len(tokens))
        numbers = {number: i for i, number in enumerate(kept)}
        asked = {numbers[number]: entries for number, entries in logprobs.items() if number in numbers}
        return Sampled(seqs, [tokens[number] for number in kept], asked)

    def _take_back(self, seq: Sequence, num_rejected: int) -> None:
        seq.num_tokens -= num_rejected
        if seq in self.verifying:  # and was not preempted since
            self.verifying.remove(seq)
            seq.num_computed_tokens -= num_rejected
            self._block_manager.trim(seq)
            self._decodes.add(seq)

    def wake(self) -> None:
        """Results were taken: whoever waits for no more of them is decoded again."""
        for seq in [seq for seq in self.postponed if seq.num_known_tokens == seq.num_tokens]:
            self.postponed.remove(seq)
            self._decodes.add(seq)
