"""Structured: follows the text of every constrained sequence, and has the masks of each step filled while it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLExecutor

from nanoengine.core.errors import NanoEngineError, NoTokenLeft
from nanoengine.core.messages import StepResult
from nanoengine.core.scheduler import Scheduler, Step
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Phase, Request, Sequence
from nanoengine.speculation.speculation import CONSTRAINT
from nanoengine.structured.constraint import Constraint
from nanoengine.structured.grammars import Grammars
from nanoengine.structured.params import StructuredOutputs

MASKS = "grammar masks"
"""In `StepPlan.extras`: `StepMasks`."""


class GrammarTooComplex(NanoEngineError, ValueError):
    """A text is so ambiguous under its grammar that a mask takes more than its limit."""


class StepMasks:
    """The masks of a step: which tokens each of its constrained samples may be.

    Args:
        rows: of the runner, with how many masks each has, in the order of the samples.
        bits: what is being filled: [num_masks, words] int32, a bit for each token, in little-endian words.
    """

    def __init__(self, rows: list[tuple[int, int]], bits: Future[np.ndarray]):
        self.rows, self._bits = rows, bits

    def wait(self) -> np.ndarray:
        return self._bits.result()

    def __reduce__(self) -> tuple[Callable[..., StepMasks], tuple[Any, ...]]:
        """To another process it goes when it is filled."""
        return _filled, (self.rows, self.wait())


def _filled(rows: list[tuple[int, int]], bits: np.ndarray) -> StepMasks:
    done: Future[np.ndarray] = Future()
    done.set_result(bits)
    return StepMasks(rows, done)


class Structured(PolicyPart):
    """A constrained sequence is in one step at a time: the mask of a token depends on the token before it. All others overlap.

    Args:
        parts: of the policy.
        drafter: one of them while there are constrained sequences; None: another one drafts all the time.
        num_threads: that fill the masks of several sequences at once; None: llguidance's own choice.
    """

    def __init__(
        self, grammars: Grammars, parts: list[PolicyPart], drafter: PolicyPart | None, num_threads: int | None = None
    ):
        self.grammars, self.parts, self.drafter = grammars, parts, drafter
        self.constraints: dict[Sequence, Constraint] = {}
        self.words = -(-grammars.vocab_size // 32)
        self._filler = ThreadPoolExecutor(
            1, "masks"
        )  # llguidance lets go of the interpreter and has threads of its own
        self._executor: LLExecutor | None = None
        self._num_threads = num_threads
        self._in_flight: dict[int, StepMasks] = {}  # by the number of the step
        self.num_masks = 0

    def made(self, request: Request) -> None:
        """Compile its grammar, in the thread of whoever asks."""
        if (outputs := outputs_of(request)) is not None:
            self.grammars.matcher(outputs)

    def submitted(self, request: Request) -> None:
        if (outputs := outputs_of(request)) is None:
            return
        if self.drafter is not None and self.drafter not in self.parts:
            self.parts.append(self.drafter)
        for seq in request.sequences:
            constraint = Constraint(self.grammars.matcher(outputs), outputs.behind)
            self.constraints[seq] = seq.state[CONSTRAINT] = constraint
            seq.stop_token_ids |= set(self.grammars.eos_token_ids)  # where the grammar ends, `ignore_eos` or not

    def postponed(self, scheduler: Scheduler) -> Iterable[Sequence]:
        return (seq for seq in self.constraints if seq.phase is Phase.DECODING and not seq.has_all_tokens)

    def complete(self, step: Step) -> None:
        if not self.constraints:
            return
        asked: list[tuple[Constraint, list[int]]] = []
        rows: list[tuple[int, int]] = []
        samples: list[tuple[Sequence, tuple[int, ...]]] = [(seq, ()) for seq in step.decodes]
        samples += [(seq, run.drafts) for seq, run in zip(step.runs, step.plan.runs, strict=True) if run.samples]
        for seq, drafts in samples:
            constraint = self.constraints.get(seq)
            if constraint is not None and constraint.is_open:
                asked.append((constraint, list(drafts)))
                rows.append((seq.row, 1 + len(drafts)))
        if asked:
            masks = StepMasks(rows, self._filler.submit(self._fill, asked))
            self._in_flight[step.number] = step.plan.extras[MASKS] = masks

    def _fill(self, asked: list[tuple[Constraint, list[int]]]) -> np.ndarray:
        if self._executor is None:
            self._executor = LLExecutor(self._num_threads)
        firsts = np.cumsum([0, *(1 + len(drafts) for _, drafts in asked)]).tolist()
        bits = np.zeros((firsts[-1], self.words), np.int32)
        target = bits.ctypes.data, 4 * self.words, len(bits)
        placed = [(own.matcher, first, drafts) for (own, drafts), first in zip(asked, firsts, strict=False)]
        if plain := [(matcher, first) for matcher, first, drafts in placed if not drafts and not matcher.is_error()]:
            self._executor.unsafe_compute_mask_ptr(plain, *target)
        if drafted := [each for each in placed if each[2] and not each[0].is_error()]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *target)
        for matcher, first, drafts in placed:
            if matcher.is_error():  # beyond a limit; otherwise it would allow an end
                bits[first : first + 1 + len(drafts)] = 0
        self.num_masks += len(bits)
        return bits

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        if (masks := self._in_flight.pop(step.number, None)) is not None:
            masks.wait()  # a step that failed may be over before its masks
        if not self.constraints:
            return
        for seq in seqs:
            constraint = self.constraints.get(seq)
            if constraint is None:
                continue
            constraint.read(seq.token_ids[seq.num_prompt_tokens + constraint.num_read :])
            if constraint.error and isinstance(seq.error, NoTokenLeft):
                seq.error = GrammarTooComplex(f"structured_outputs: {constraint.error.splitlines()[0]}")

    def finished(self, seq: Sequence) -> None:
        if self.constraints.pop(seq, None) is not None and not self.constraints and self.drafter in self.parts:
            self.parts.remove(self.drafter)


def outputs_of(request: Request) -> StructuredOutputs | None:
    found: StructuredOutputs | None = getattr(request.params, "structured_outputs", None)
    return found
