"""GrammarPolicy: follows the text of constrained sequences, and fills the masks of each step while it is computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from hashlib import blake2b
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLExecutor, LLMatcher

from nanoengine.core.errors import NoTokenLeft
from nanoengine.core.messages import StepResult
from nanoengine.core.scheduler import Scheduler, Step
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Phase, Request, Sequence
from nanoengine.features.draft_constraint import CONSTRAINT
from nanoengine.features.sampling.thinking import THOUGHT
from nanoengine.features.structured.constraint import SLOW, Constraint, ForcedText
from nanoengine.features.structured.grammars import Grammars
from nanoengine.features.structured.params import StructuredOutputs

LONG = re.compile('[^"]{4096}')
"""A long text in a grammar: masks of such a grammar may be slow, and are filled in advance."""

MAX_WAIT = 0.0005
"""Seconds that a step waits for masks which are filled in advance. A sequence with a later mask is left out of the step."""

MASKS = "grammar masks"
"""In `StepPlan.extras`: `StepMasks`."""


class GrammarTooComplex(NoTokenLeft):
    """A text is so ambiguous in its grammar that a mask exceeds its limit."""


class StepMasks:
    """The masks of a step: the allowed tokens of each of its constrained samples.

    Args:
        rows: (row of the runner, number of its masks), in the order of the samples.
        bits: the masks, which are being filled: [num_masks, words] int32, a bit for each token, in little-endian words.
    """

    def __init__(self, rows: list[tuple[int, int]], bits: Future[np.ndarray]):
        self.rows, self._bits = rows, bits

    def wait(self) -> np.ndarray:
        return self._bits.result()

    def settle(self) -> None:
        """Wait until the masks are filled, or have failed."""
        wait([self._bits])

    def __reduce__(self) -> tuple[Callable[..., StepMasks], tuple[Any, ...]]:
        """The masks are pickled for another process when they are filled."""
        return _filled, (self.rows, self.wait())


def _filled(rows: list[tuple[int, int]], bits: np.ndarray) -> StepMasks:
    filled: Future[np.ndarray] = Future()
    filled.set_result(bits)
    return StepMasks(rows, filled)


class GrammarPolicy(PolicyPart):
    """The policy's part of grammars. A constrained sequence is in one step at a time, since the mask of a token depends on the
    token before it. Other sequences overlap.

    Args:
        drafter: idle while there are no constrained sequences; None: the engine has another drafter.
        num_threads: threads that fill the masks of several sequences; None: llguidance's default.
    """

    is_idle = True

    def __init__(self, grammars: Grammars, drafter: PolicyPart | None = None, num_threads: int | None = None):
        self.grammars, self.drafter = grammars, drafter
        self.constraints: dict[Sequence, Constraint] = {}
        self._made: WeakKeyDictionary[Request, LLMatcher] = WeakKeyDictionary()  # until it is submitted
        self._filler = ThreadPoolExecutor(1, "masks")  # llguidance's threads run outside of Python's lock
        self._ahead = ThreadPoolExecutor(1, "masks ahead")
        self._forced: dict[bytes, ForcedText] = {}
        self._executor: LLExecutor | None = None
        self._num_threads = num_threads
        self._in_flight: dict[int, StepMasks] = {}  # by the number of the step

    def made(self, request: Request) -> None:
        """Compile the grammar of a request, in the thread of the caller."""
        if (outputs := outputs_of(request)) is not None:
            self._made[request] = self.grammars.matcher(outputs, request.client, request.cache_salt)

    def submitted(self, request: Request) -> None:
        if (outputs := outputs_of(request)) is None:
            return
        matcher = self._made.pop(request)  # not from the cache, which may have dropped it
        name = blake2b(repr((request.client, request.cache_salt, outputs.key)).encode(errors="replace"))
        options: dict[str, Any] = {"name": name.digest(), "cache": self._forced, "long_text": self.grammars.long_text}
        options["is_large"] = LONG.search(outputs.text) is not None
        for seq in request.sequences:
            constraint = Constraint(
                matcher.deep_copy(), None if outputs.with_thought else seq.state.get(THOUGHT), **options
            )
            constraint.read(seq.output_token_ids)
            constraint.is_long = constraint.is_large  # examined by the next call
            self.constraints[seq] = seq.state[CONSTRAINT] = constraint
            seq.stop_token_ids |= set(self.grammars.eos_token_ids)  # at the end of the grammar, also with `ignore_eos`
        self._rest()

    def postponed(self, scheduler: Scheduler) -> Iterable[Sequence]:
        late: dict[Future[np.ndarray], set[Sequence]] = {}
        for seq, constraint in self.constraints.items():
            if seq.phase is Phase.DECODING and not seq.has_all_tokens:
                yield seq
            elif seq.phase is Phase.DECODING and (mask := constraint.ahead) is not None and not mask.done():
                late.setdefault(mask, set()).add(seq)
        if late:
            still_late = wait(late, MAX_WAIT).not_done
            seqs = {seq for mask in still_late for seq in late[mask]}
            if still_late and seqs.issuperset(scheduler.running):  # the step would be empty
                still_late = wait(still_late, return_when=FIRST_COMPLETED).not_done
            for mask in still_late:
                yield from late[mask]

    def _fill_ahead(self, seqs: list[Sequence]) -> None:
        """Begin to fill the next masks of constraints that may be slow; one for all in the same state."""
        masks: dict[bytes, Future[np.ndarray]] = {}
        for seq in seqs:
            constraint = self.constraints.get(seq)
            if constraint is None or seq.finished or constraint.ahead is not None or not constraint.holds:
                continue
            is_slow = constraint.is_watched or constraint.is_large
            if is_slow and not (constraint.is_long and constraint.long_tokens()):
                if (state := constraint.state) not in masks:
                    masks[state] = self._ahead.submit(constraint.fill_ahead, self._num_words)
                constraint.ahead = masks[state]

    @property
    def _num_words(self) -> int:
        return -(-self.grammars.mask_size // 32)

    def complete(self, step: Step) -> None:
        if not self.constraints:
            return
        samples: list[tuple[Sequence, tuple[int, ...]]] = [(seq, ()) for seq in step.decodes]
        samples += [(seq, run.drafts) for seq, run in zip(step.runs, step.plan.runs, strict=True) if run.samples]
        rows: list[tuple[int, int]] = []
        constrained: list[tuple[Constraint, tuple[int, ...]]] = []
        for seq, drafts in samples:
            constraint = self.constraints.get(seq)
            if constraint is not None and constraint.holds:
                constrained.append((constraint, drafts))
                rows.append((seq.row, 1 + len(drafts)))
        if constrained:
            masks = StepMasks(rows, self._filler.submit(self._fill, constrained))
            self._in_flight[step.number] = step.plan.extras[MASKS] = masks

    def _fill(self, constrained: list[tuple[Constraint, tuple[int, ...]]]) -> np.ndarray:
        """The masks of a step: for each constraint and its drafts, 1 + num_drafts rows of [words] int32."""
        if self._executor is None:
            self._executor = LLExecutor(self._num_threads)
        firsts = np.cumsum([0, *(1 + len(drafts) for _, drafts in constrained)]).tolist()
        words = self._num_words
        bits = np.zeros((firsts[-1], words), np.int32)
        target = bits.ctypes.data, 4 * words, len(bits)
        equal: dict[tuple[bytes, tuple[int, ...]], list[tuple[Constraint, int]]] = {}  # with their first masks
        for (constraint, drafts), first in zip(constrained, firsts, strict=False):
            equal.setdefault((constraint.state, drafts), []).append((constraint, first))
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        for (_, drafts), [(constraint, first), *_] in equal.items():
            mask = None if constraint.ahead is None else constraint.ahead.result()
            rows = bits[first : first + 1 + len(drafts)]
            if constraint.error or (constraint.is_long and constraint.fill_long(rows, drafts)):
                continue
            if drafts:
                drafted.append((constraint.matcher, first, list(drafts)))
            elif mask is not None:
                bits[first] = mask
            elif constraint.is_watched:  # alone, so that only its time is measured
                bits[first] = constraint.fill_ahead(words)
            else:
                plain.append((constraint.matcher, first))
        start = perf_counter()
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *target)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *target)
        if perf_counter() - start > SLOW:  # one of them may be slow, or the machine is busy: the next masks will show
            for [(constraint, _), *_] in equal.values():
                constraint.is_watched = True
        for (_, drafts), [(constraint, first), *others] in equal.items():
            rows = bits[first : first + 1 + len(drafts)]
            if not constraint.is_long:
                constraint.long_tokens()
            if constraint.error:  # beyond a limit; otherwise the mask would allow an end
                rows[:] = 0
            for other, at in others:
                other.failure, other.is_long = constraint.error, constraint.is_long
                other.is_watched = constraint.is_watched
                bits[at : at + len(rows)] = rows
        for (constraint, _), first in zip(constrained, firsts, strict=False):
            for token in () if constraint.error else constraint.also:
                bits[first, token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
        return bits

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        if (masks := self._in_flight.pop(step.number, None)) is not None:
            masks.settle()  # a failed step may end before its masks
        self._rest()
        # A failed step has no new tokens, and the masks of the next one may be using the constraints.
        if not self.constraints or isinstance(result, BaseException):
            return
        for seq in seqs:
            constraint = self.constraints.get(seq)
            if constraint is None:
                continue
            constraint.read(seq.token_ids[seq.num_prompt_tokens + constraint.num_read :])
            if constraint.error and isinstance(seq.error, NoTokenLeft):
                reason = constraint.error.partition("\n")[0]  # behind it may be the whole grammar
                seq.error = GrammarTooComplex("structured_outputs", f": {reason}")
        self._fill_ahead(seqs)

    def concerns(self, seq: Sequence) -> bool:
        return seq in self.constraints

    def finished(self, seq: Sequence) -> None:
        self.constraints.pop(seq, None)
        self._rest()

    def _rest(self) -> None:
        """Become idle without constrained sequences and masks."""
        self.is_idle = not self.constraints and not self._in_flight
        if self.drafter is not None:
            self.drafter.is_idle = not self.constraints

    def close(self) -> None:
        self._filler.shutdown(cancel_futures=True)
        self._ahead.shutdown(cancel_futures=True)
        self._executor = None
        self.grammars.close()


def outputs_of(request: Request) -> StructuredOutputs | None:
    outputs: StructuredOutputs | None = getattr(request.params, "structured_outputs", None)
    return outputs
