"""Seams: what the policy asks of capabilities that it does not know. Who inherits says only what it decides."""

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
"""Parts that have raised, and what: sequences end that they concern."""


def ask(faults: Faults, part: Any, what: str, default: Any, *args: Any) -> Any:
    """What a part answers; if it raises, the default, and the part is at fault."""
    try:
        return getattr(part, what)(*args)
    except Exception as error:
        return _blame(faults, part, what, error, default)


def ask_each(faults: Faults, part: Any, what: str, default: Iterable[Any], *args: Any) -> Iterator[Any]:
    """As `ask`, one answer after the other: behind those before a part raised, the default."""
    try:
        yield from getattr(part, what)(*args)
    except Exception as error:
        yield from _blame(faults, part, what, error, default)


def _blame(faults: Faults, part: Any, what: str, error: Exception, default: Any) -> Any:
    logging.getLogger("nanoengine").error("%s.%s has failed", type(part).__name__, what, exc_info=error)
    faults.append((part, error))
    return default


class KVLayout:
    """Which tokens of a sequence the layers of one KV group need K/V of: all, unless a subclass says otherwise. Called by the
    block manager.
    """

    forgets = False
    """Whether there are tokens that no later token attends to any more."""

    def first_seen(self, position: int) -> int:
        """Smallest position that the token at `position`, or any later one, attends to."""
        return 0

    def reserve(self, start: int, num_tokens: int) -> int:
        """How many tokens a sequence gets room for when it starts behind `start` cached ones; its chunks ask for the rest."""
        return num_tokens


class KVStore:
    """Another place where blocks are kept: host memory, files, another engine. Called by the block manager; never waits."""

    def cached(self, group: int, hash: bytes, parent: bytes, tokens: bytes, block: int) -> None:
        """A block of the pool can be found from now on."""

    def evicted(self, group: int, hash: bytes, tokens: bytes, block: int) -> None:
        """A block of the pool is about to be overwritten by the next step; it was sound."""

    def invalidated(self, group: int, hash: bytes, tokens: bytes) -> None:
        """The K/V of this prefix may be wrong: forget it."""

    def has(self, group: int, hash: bytes, tokens: bytes) -> bool:
        return False

    def may_end(self, hash: bytes, tokens: bytes, has: Callable[[int, bytes, bytes], bool]) -> bool:
        """Whether a sequence may start behind a cached prefix that ends with this block. Models with recurrent states can resume
        only where a snapshot exists.
        """
        return True

    def hold(self, blocks: Seq[tuple[bytes, bytes]]) -> None:
        """A sequence starts behind these blocks (hash, tokens): keep those that are to be loaded, until `complete`."""

    def load(self, group: int, hash: bytes, tokens: bytes, block: int) -> None:
        """Copy what it has into a block of the pool, before the next step computes."""

    def clear(self) -> None:
        """Forget everything. A step follows that carries out what this takes, if a `PolicyPart` wants one."""

    def closing(self) -> None:
        """The engine ends: keep what is in the pool. A last step follows, as behind `clear`."""


class PolicyPart:
    """The policy's part of a capability. The methods stand in the order in which the scheduler and the engine call them."""

    is_idle = False
    """Set while no request uses the capability: only `made`, `submitted` and `close` are called, so that steps cost nothing."""

    def made(self, request: Request) -> None:
        """The request was checked, and may be submitted later. Called in the thread of its maker; a named error refuses it."""

    def submitted(self, request: Request) -> None:
        """The request was queued."""

    # ---- while the scheduler makes a step

    def make_way(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> Iterable[Sequence]:
        """Running sequences that must be preempted before the next step is made. Called first in every step."""
        return ()

    def postponed(self, scheduler: Scheduler) -> Iterable[Sequence]:
        """Decoding sequences to skip in this step, because the choice of their next token needs one that is still in flight."""
        return ()

    def candidates(self, waiting: Iterable[Sequence]) -> Iterable[Sequence]:
        """Waiting sequences that may start now, in the order in which they are tried. The scheduler takes one after the other,
        and what it took may decide who comes next: do not look ahead.
        """
        return waiting

    def allowed(self, seq: Sequence, budget: int) -> int:
        """How many tokens of a prompt may be computed now, at most `budget`; 0: none in this step."""
        return budget

    def took(self, seq: Sequence, count: int) -> None:
        """`count` tokens of a prompt were put into the step."""

    def wants_step(self) -> bool:
        """Whether a step is to be made although it computes nothing."""
        return False

    def max_drafts(self, num_tokens: int, budget: int) -> int:
        """How many drafts a step may have beside so many other tokens, at most `budget`."""
        return budget

    def draft(self, scheduler: Scheduler, step: Step) -> None:
        """The decodes and chunks of the step are chosen: some decodes may become runs with drafts."""

    def complete(self, step: Step) -> None:
        """The plan is made, but for what the runner's part of the capability must know."""

    # ---- when its result is there

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        """A step was committed, or has failed, or was in flight behind one that has failed (`step.is_dropped`).

        Args:
            seqs: those that got a token, or ended; their new tokens are not text yet.
        """

    def concerns(self, seq: Sequence) -> bool:
        """Whether a sequence must end if this part has raised while a step of it was made, or behind it."""
        return True

    def finished(self, seq: Sequence) -> None:
        """The sequence has ended, and its text is complete."""

    def close(self) -> None:
        """Nothing is asked any more: end threads and processes."""
