"""Seams: interfaces of the policy for capabilities. A subclass overrides only the methods that it needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoengine.core.messages import StepResult
    from nanoengine.core.scheduler import Scheduler, Step
    from nanoengine.core.sequence import Request, Sequence

Faults = list[tuple[Any, Exception]]
"""(part, exception) of each part that raised: the sequences end that it concerns."""


def call_part(faults: Faults, part: Any, method: str, default: Any, *args: Any) -> Any:
    """The result of a method of a part. If it raises, the default, and the part is at fault."""
    try:
        return getattr(part, method)(*args)
    except Exception as error:
        return _add_fault(faults, part, method, error, default)


def iterate_part(faults: Faults, part: Any, method: str, default: Iterable[Any], *args: Any) -> Iterator[Any]:
    """As `call_part`, for a method with several results: if it raises after some of them, the default follows."""
    try:
        yield from getattr(part, method)(*args)
    except Exception as error:
        yield from _add_fault(faults, part, method, error, default)


def _add_fault(faults: Faults, part: Any, method: str, error: Exception, default: Any) -> Any:
    logging.getLogger("nanoengine").error("%s.%s has failed", type(part).__name__, method, exc_info=error)
    faults.append((part, error))
    return default


class KVLayout:
    """The tokens whose K/V the layers of one KV group need: here all tokens of a sequence. Called by the block manager."""

    forgets = False
    """Whether some tokens are outside the windows of all later tokens."""

    def first_visible(self, position: int) -> int:
        """First position in the window of the token at `position`, or of any later token."""
        return 0

    def reserve(self, start: int, num_tokens: int) -> int:
        """Tokens with blocks at the start of a sequence behind `start` cached ones; chunks allocate the blocks of the others."""
        return num_tokens


class KVStore:
    """A cache of blocks outside the pool: host memory, files, another engine. Called by the block manager; never waits."""

    def cached(self, group: int, hash: bytes, parent: bytes, tokens: bytes, block: int) -> None:
        """A block of the pool was added to the prefix cache."""

    def evicted(self, group: int, hash: bytes, tokens: bytes, block: int) -> None:
        """A block of the pool is about to be overwritten by the next step; it was sound."""

    def invalidated(self, group: int, hash: bytes, tokens: bytes) -> None:
        """The K/V of this prefix may be wrong: drop it."""

    def has(self, group: int, hash: bytes, tokens: bytes) -> bool:
        """Whether it has this block."""
        return False

    def may_end(self, hash: bytes, tokens: bytes, has: Callable[[int, bytes, bytes], bool]) -> bool:
        """Whether a sequence may start behind a cached prefix that ends here: recurrent states need a snapshot there."""
        return True

    def hold(self, blocks: Seq[tuple[bytes, bytes]]) -> None:
        """A sequence starts behind these blocks (hash, tokens): do not evict them before `complete`."""

    def load(self, group: int, hash: bytes, tokens: bytes, block: int) -> None:
        """Copy a stored block into a block of the pool, before the next step computes."""

    def clear(self) -> None:
        """Drop all blocks. A step follows, with the copies or deletions for it, if a `PolicyPart` wants one."""

    def closing(self) -> None:
        """The engine ends: save the blocks of the pool. A last step follows, as behind `clear`."""


class PolicyPart:
    """The policy's part of a capability. The methods are in the order of their calls by the scheduler and the engine."""

    is_idle = False
    """Set while no request uses the capability: only `made`, `submitted` and `close` are called, so that steps cost nothing."""

    def made(self, request: Request) -> None:
        """The request was checked, and may be submitted later. Called in the thread of the caller; a named error refuses it."""

    def submitted(self, request: Request) -> None:
        """The request was queued."""

    # ---- while the scheduler makes a step

    def preemption_victims(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> Iterable[Sequence]:
        """Running sequences that must be preempted before the next step is made. Called first in every step."""
        return ()

    def postponed(self, scheduler: Scheduler) -> Iterable[Sequence]:
        """Decoding sequences to skip in this step, because the choice of their next token needs one that is still in flight."""
        return ()

    def candidates(self, waiting: Iterable[Sequence]) -> Iterable[Sequence]:
        """Waiting sequences that may start now, in order; without look-ahead, since each admission may change the next one."""
        return waiting

    def allowed(self, seq: Sequence, budget: int) -> int:
        """Most tokens of a prompt to compute now, at most `budget`; 0: no token in this step."""
        return budget

    def took(self, seq: Sequence, count: int) -> None:
        """`count` tokens of a prompt were added to the step."""

    def wants_step(self) -> bool:
        """Whether to make a step although it computes nothing."""
        return False

    def max_drafts(self, num_tokens: int, budget: int) -> int:
        """How many drafts a step may have beside so many other tokens, at most `budget`."""
        return budget

    def draft(self, scheduler: Scheduler, step: Step) -> None:
        """Called after the decodes and chunks of the step are chosen: some decodes may become runs with drafts."""

    def complete(self, step: Step) -> None:
        """Called last: add the values for the runner's part of the capability to the plan."""

    # ---- after the step

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        """A step was committed, or has failed, or was in flight behind one that has failed (`step.is_dropped`).

        Args:
            seqs: with new tokens, which are not text yet, or with an end.
        """

    def concerns(self, seq: Sequence) -> bool:
        """Whether a sequence must end if this part has raised in the schedule of its step, or after it."""
        return True

    def finished(self, seq: Sequence) -> None:
        """The sequence has ended, and its text is complete."""

    def close(self) -> None:
        """Last call: end threads and processes."""


SCHEDULE_HOOKS = ("preemption_victims", "postponed", "candidates", "allowed", "took", "wants_step", "draft", "complete")
"""Methods of `PolicyPart` that the scheduler calls."""
