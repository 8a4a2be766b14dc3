"""Accounts: a clock for each client, of the time that steps spent on its work, and what those steps teach of `StepCost`.

A step is charged when it is made, with the time that it is predicted to take. When its result is there, the charge is corrected
to the time that it took.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from nanoengine.core.messages import StepResult
from nanoengine.core.scheduler import Step
from nanoengine.core.sequence import Sequence
from nanoengine.features.fairness.step_cost import StepCost, Work, told_of


class _Made(NamedTuple):
    """A step that was made, until its result is there."""

    began: float
    work: Work
    parts: dict[str, float]  # of each client
    predicted: float  # seconds, which were charged
    is_new: bool  # not one of many alike, of which the first says what is to be learned


class Accounts:
    """Charges clients for steps.

    Args:
        num_unfinished: sequences of each client that has any.
        clock: measures steps, in seconds; None: they take what is predicted.

    Attributes:
        clocks: seconds of each client, from a beginning that all have in common.
        spent: seconds of steps of each client since it came: other threads may read it.
    """

    def __init__(self, num_unfinished: Mapping[str, int], clock: Callable[[], float] | None):
        self.num_unfinished, self.clock = num_unfinished, clock
        self.cost = StepCost()
        self.clocks: dict[str, float] = {}
        self.spent = defaultdict[str, float](float)
        self._now = 0.0  # the clock of the client that the last step was made for, before that step
        self._began, self._last_end = 0.0, float("-inf")  # the step that is made, and the last that was measured
        self._in_flight: dict[int, _Made] = {}  # steps, by their numbers
        self._decodes: list[Sequence] = []  # of the last step that was charged, if it had nothing else
        self._work, self._parts = Work(), dict[str, float]()  # its work, and the part of it of each client
        self._due = 0.0  # seconds of it, and of those alike, that are on no clock yet

    def open(self, client: str, *, was_alone: bool) -> None:
        """A client comes: as if it had been served as much as who was most behind in the last step, or more if it was.

        Args:
            was_alone: results of steps came when there was one client, and nobody told them here.
        """
        self.charge_due()
        if was_alone:
            self._in_flight.clear()
        now = self._now
        for gone in [own for own, at in self.clocks.items() if at <= now and own not in self.num_unfinished]:
            del self.clocks[gone]
        self.clocks[client] = max(self.clocks.get(client, now), now)
        for gone in self.spent.keys() - self.clocks.keys():
            del self.spent[gone]

    def begin_step(self) -> float:
        """A step is about to be made: by the clock, now; 0 without a clock."""
        self._began = self.clock() if self.clock is not None else 0.0
        return self._began

    def leads(self, client: str) -> None:
        """The step is made for this client, whose clock is the most behind."""
        self._now = max(self._now, self.clocks[client])

    def charge(self, step: Step, *, is_new: bool) -> None:
        """Each client pays a part of what the step is predicted to take, by what its own work would take alone."""
        if not (step.runs or step.decodes):
            return  # it carries out orders of stores, and computes nothing
        if step.runs or step.decodes != self._decodes:
            self.charge_due()
            self._divide(step)
        predicted = self.cost.of(self._work)
        self._due += predicted
        if self.clock is not None:
            self._in_flight[step.number] = _Made(self._began, self._work, self._parts, predicted, is_new)

    def charge_due(self) -> None:
        """Put on the clocks what is due."""
        if self._due:
            self._charge(self._parts, self._due)
            self._due = 0.0

    def _charge(self, parts: Mapping[str, float], seconds: float) -> None:
        for client, part in parts.items():
            self.clocks[client] = self.clocks.get(client, 0.0) + part * seconds
            self.spent[client] += part * seconds

    def _divide(self, step: Step) -> None:
        """Find the work of a step, and the part of each client."""
        amounts = defaultdict[str, list[float]](lambda: [0.0] * len(Work._fields))  # the `Work` of each client
        for seq in step.decodes:
            own = amounts[seq.request.client]
            own[0] += 1
            if seq.logprobs is not None:
                own[3] += told_of(seq, "logprobs")
        for seq, run in zip(step.runs, step.plan.runs, strict=True):
            own, count = amounts[seq.request.client], run.num_new
            own[3] += count * told_of(seq, "logprobs" if run.drafts else "prompt_logprobs")
            if run.drafts:
                own[0] += count
            else:
                own[1] += count
                own[2] += count * (run.start + count / 2)
        self._work = Work(*map(sum, zip(*amounts.values(), strict=True)))
        alone = {client: self.cost.of(Work(*own)) for client, own in amounts.items()}
        whole = sum(alone.values())
        self._parts = {client: own / whole for client, own in alone.items()}
        self._decodes = [] if step.runs else step.decodes.copy()

    def settle(self, step: Step, result: StepResult | BaseException) -> None:
        """The result of a step is there: charge what it took instead of what was predicted, and learn from it."""
        if self.clock is None or (made := self._in_flight.pop(step.number, None)) is None:
            return
        now = self.clock()
        seconds, self._last_end = now - max(made.began, self._last_end), now
        if seconds <= 0 or isinstance(result, BaseException) or step.is_dropped:
            return
        if made.is_new:
            self.cost.learn(made.work, seconds)
        if made.parts is self._parts:
            self._due += seconds - made.predicted
        else:
            self._charge(made.parts, seconds - made.predicted)
