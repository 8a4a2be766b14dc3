"""Structured: follows the text of every constrained sequence, and has the masks of each step filled while it is computed."""

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
from nanoengine.features.structured.constraint import SLOW, Constraint, Forced
from nanoengine.features.structured.grammars import Grammars
from nanoengine.features.structured.params import StructuredOutputs

LONG = re.compile('[^"]{4096}')
"""In a grammar: a text that may take long. Its masks are filled ahead."""

MAX_WAIT = 0.0005
"""Seconds that a step waits for masks which are filled ahead. Whose mask is later is left out of the step."""

MASKS = "grammar masks"
"""In `StepPlan.extras`: `StepMasks`."""


class GrammarTooComplex(NoTokenLeft):
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

    def settle(self) -> None:
        """Wait until they are filled, or it is known that they cannot be."""
        wait([self._bits])

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
        self.is_idle = True
        self.constraints: dict[Sequence, Constraint] = {}
        self._made: WeakKeyDictionary[Request, LLMatcher] = WeakKeyDictionary()  # until it is submitted
        self._filler = ThreadPoolExecutor(1, "masks")  # llguidance has threads of its own, outside of Python's lock
        self._ahead = ThreadPoolExecutor(1, "masks ahead")
        self._shared: dict[bytes, Forced] = {}
        self._executor: LLExecutor | None = None
        self._num_threads = num_threads
        self._in_flight: dict[int, StepMasks] = {}  # by the number of the step

    def made(self, request: Request) -> None:
        """Compile its grammar, in the thread of whoever asks."""
        if (outputs := outputs_of(request)) is not None:
            self._made[request] = self.grammars.matcher(outputs, request.client, request.cache_salt)

    def submitted(self, request: Request) -> None:
        if (outputs := outputs_of(request)) is None:
            return
        self.is_idle = False
        if self.drafter is not None and self.drafter not in self.parts:
            self.parts.append(self.drafter)
        matcher = self._made.pop(request)  # who asks the grammars again may have to wait: others were asked for since
        name = blake2b(repr((request.client, request.cache_salt, outputs.key)).encode(errors="replace"))
        options: dict[str, Any] = {"name": name.digest(), "shared": self._shared, "long_text": self.grammars.long_text}
        options["is_large"] = LONG.search(outputs.text) is not None
        for seq in request.sequences:
            constraint = Constraint(
                matcher.deep_copy(), None if outputs.with_thought else seq.state.get(THOUGHT), **options
            )
            constraint.read(seq.output_token_ids)
            constraint.is_long = constraint.is_large  # who asks next looks
            self.constraints[seq] = seq.state[CONSTRAINT] = constraint
            seq.stop_token_ids |= set(self.grammars.eos_token_ids)  # where the grammar ends, `ignore_eos` or not

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
            if still_late and seqs.issuperset(scheduler.running):  # there is nothing else to do
                still_late = wait(still_late, return_when=FIRST_COMPLETED).not_done
            for mask in still_late:
                yield from late[mask]

    def _fill_ahead(self, seqs: list[Sequence]) -> None:
        """Begin with the next masks of those that may be slow; one for all in the same state."""
        masks: dict[bytes, Future[np.ndarray]] = {}
        for seq in seqs:
            own = self.constraints.get(seq)
            if own is None or seq.finished or own.ahead is not None or not own.holds:
                continue
            if (own.is_watched or own.is_large) and not (own.is_long and own.long_tokens()):
                if own.state not in masks:
                    masks[own.state] = self._ahead.submit(own.fill_ahead, self._num_words)
                own.ahead = masks[own.state]

    @property
    def _num_words(self) -> int:
        return -(-self.grammars.mask_size // 32)

    def complete(self, step: Step) -> None:
        if not self.constraints:
            return
        asked: list[tuple[Constraint, list[int]]] = []
        rows: list[tuple[int, int]] = []
        samples: list[tuple[Sequence, tuple[int, ...]]] = [(seq, ()) for seq in step.decodes]
        samples += [(seq, run.drafts) for seq, run in zip(step.runs, step.plan.runs, strict=True) if run.samples]
        for seq, drafts in samples:
            constraint = self.constraints.get(seq)
            if constraint is not None and constraint.holds:
                asked.append((constraint, list(drafts)))
                rows.append((seq.row, 1 + len(drafts)))
        if asked:
            masks = StepMasks(rows, self._filler.submit(self._fill, asked))
            self._in_flight[step.number] = step.plan.extras[MASKS] = masks

    def _fill(self, asked: list[tuple[Constraint, list[int]]]) -> np.ndarray:
        if self._executor is None:
            self._executor = LLExecutor(self._num_threads)
        firsts = np.cumsum([0, *(1 + len(drafts) for _, drafts in asked)]).tolist()
        words = self._num_words
        bits = np.zeros((firsts[-1], words), np.int32)
        target = bits.ctypes.data, 4 * words, len(bits)
        alike: dict[tuple[bytes, tuple[int, ...]], list[int]] = {}
        for number, (own, drafts) in enumerate(asked):
            alike.setdefault((own.state, tuple(drafts)), []).append(number)
        placed = [(*asked[numbers[0]], firsts[numbers[0]]) for numbers in alike.values()]
        together: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        for own, drafts, first in placed:
            mask = None if own.ahead is None else own.ahead.result()
            if own.error or (own.is_long and own.fill_long(bits[first : first + 1 + len(drafts)], drafts)):
                continue
            if drafts:
                drafted.append((own.matcher, first, drafts))
            elif mask is not None:
                bits[first] = mask
            elif own.is_watched:  # alone: nobody else's time is counted
                bits[first] = own.fill_ahead(words)
            else:
                together.append((own.matcher, first))
        start = perf_counter()
        if together:
            self._executor.unsafe_compute_mask_ptr(together, *target)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *target)
        if perf_counter() - start > SLOW:  # one of them may be slow, or the machine is busy: the next masks will say
            for own, _, _ in placed:
                own.is_watched = True
        for numbers, (own, drafts, first) in zip(alike.values(), placed, strict=True):
            rows = bits[first : first + 1 + len(drafts)]
            if not own.is_long:
                own.long_tokens()
            if own.error:  # beyond a limit; otherwise it would allow an end
                rows[:] = 0
            for number in numbers[1:]:
                other = asked[number][0]
                other.failure, other.is_watched, other.is_long = own.error, own.is_watched, own.is_long
                bits[firsts[number] : firsts[number] + len(rows)] = rows
        for (own, _), first in zip(asked, firsts, strict=False):
            for token in () if own.error else own.also:
                bits[first, token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
        return bits

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        if (masks := self._in_flight.pop(step.number, None)) is not None:
            masks.settle()  # a step that failed may be over before its masks
        self._rest()
        # Behind a step that failed there are no new tokens, and the masks of the next one may use what would be read.
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
        if self.constraints.pop(seq, None) is not None and not self.constraints and self.drafter in self.parts:
            self.parts.remove(self.drafter)
        self._rest()

    def _rest(self) -> None:
        """Until another constrained request comes: no masks are filled, and no text is followed."""
        self.is_idle = not self.constraints and not self._in_flight

    def close(self) -> None:
        self._filler.shutdown(cancel_futures=True)
        self._ahead.shutdown(cancel_futures=True)
        self._executor = None
        self.grammars.close()


def outputs_of(request: Request) -> StructuredOutputs | None:
    found: StructuredOutputs | None = getattr(request.params, "structured_outputs", None)
    return found
