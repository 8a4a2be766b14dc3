"""Accounts: a clock for each client with the time that steps spent on its work. The measured steps train `StepCost`.

A step is charged when it is made, with its predicted time. When its result is available, the charge is corrected to the measured
time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from nanoengine.core.messages import StepResult
from nanoengine.core.scheduler import Step
from nanoengine.core.sequence import Sequence
from nanoengine.features.fairness.step_cost import StepCost, Work, num_logprobs


class _PendingCharge(NamedTuple):
    """The charge of a step in flight."""

    began: float
    work: Work
    parts: dict[str, float]  # client -> its part, 0 to 1
    predicted: float  # seconds that were charged
    is_new: bool  # whether `StepCost` learns from it: only from the first of equal steps


class Accounts:
    """Charges clients for steps.

    Args:
        num_unfinished: sequences of each client that has any.
        clock: measures steps, in seconds; None: the predictions count.

    Attributes:
        clocks: virtual time of each client, in seconds.
        spent: seconds of steps for each client since its first request; other threads may read it.
    """

    def __init__(self, num_unfinished: Mapping[str, int], clock: Callable[[], float] | None):
        self.num_unfinished, self.clock = num_unfinished, clock
        self.cost = StepCost()
        self.clocks: dict[str, float] = {}
        self.spent = defaultdict[str, float](float)
        self._now = 0.0  # the clock of the client that the last step was made for, before that step
        self._began, self._last_end = 0.0, float("-inf")  # of the step that is being made; of the last measured step
        self._in_flight: dict[int, _PendingCharge] = {}  # by number of the step
        self._decodes: list[Sequence] = []  # of the last charged step, if it had nothing else
        self._work, self._parts = Work(), dict[str, float]()  # of the last charged step
        self._due = 0.0  # seconds of it, and of equal steps, that are on no clock yet

    def open(self, client: str, *, was_alone: bool) -> None:
        """A new client starts with the smallest clock among active clients, or with its last one if that is larger.

        Args:
            was_alone: there was one client, so that the results of steps were not reported here.
        """
        self.charge_due()
        if was_alone:
            self._in_flight.clear()
        now = self._now
        for gone in [other for other, at in self.clocks.items() if at <= now and other not in self.num_unfinished]:
            del self.clocks[gone]
        self.clocks[client] = max(self.clocks.get(client, now), now)
        for gone in self.spent.keys() - self.clocks.keys():
            del self.spent[gone]

    def begin_step(self) -> float:
        """A step is about to be made. Returns the time of the clock, or 0 without a clock."""
        self._began = self.clock() if self.clock is not None else 0.0
        return self._began

    def leads(self, client: str) -> None:
        """The step is made for this client, whose clock is the smallest."""
        self._now = max(self._now, self.clocks[client])

    def charge(self, step: Step, *, is_new: bool) -> None:
        """Divide the predicted time of the step among clients, in proportion to the predicted time of each client's work."""
        if not (step.runs or step.decodes):
            return  # a step with orders of stores computes nothing
        if step.runs or step.decodes != self._decodes:
            self.charge_due()
            self._divide(step)
        predicted = self.cost.of(self._work)
        if self.clock is not None and not self.cost.is_measured:
            predicted = 0.0  # it is no time yet; what the step took is charged with its result
        self._due += predicted
        if self.clock is not None:
            self._in_flight[step.number] = _PendingCharge(self._began, self._work, self._parts, predicted, is_new)

    def charge_due(self) -> None:
        """Add the time that is due to the clocks."""
        if self._due:
            self._charge(self._parts, self._due)
            self._due = 0.0

    def _charge(self, parts: Mapping[str, float], seconds: float) -> None:
        for client, part in parts.items():
            self.clocks[client] = self.clocks.get(client, 0.0) + part * seconds
            self.spent[client] += part * seconds

    def _divide(self, step: Step) -> None:
        """Count the work of a step, and divide it among clients."""
        amounts = defaultdict[str, list[float]](lambda: [0.0] * len(Work._fields))  # the `Work` of each client
        for seq in step.decodes:
            amount = amounts[seq.request.client]
            amount[0] += 1
            if seq.logprobs is not None:
                amount[3] += num_logprobs(seq, "logprobs")
        for seq, run in zip(step.runs, step.plan.runs, strict=True):
            amount, count = amounts[seq.request.client], run.num_new
            amount[3] += count * num_logprobs(seq, "logprobs" if run.drafts else "prompt_logprobs")
            if run.drafts:
                amount[0] += count
            else:
                amount[1] += count
                amount[2] += count * (run.start + count / 2)
        self._work = Work(*map(sum, zip(*amounts.values(), strict=True)))
        alone = {client: self.cost.of(Work(*amount)) for client, amount in amounts.items()}
        whole = sum(alone.values())
        self._parts = {client: seconds / whole for client, seconds in alone.items()}
        self._decodes = [] if step.runs else step.decodes.copy()

    def settle(self, step: Step, result: StepResult | BaseException) -> None:
        """Replace the predicted time of a step by the measured one, and learn from it."""
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
