"""Seams: what the core asks of capabilities that it does not know. Who inherits says only what it decides."""

from __future__ import annotations

from collections.abc import Container, Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from nanoengine.core.messages import StepResult
    from nanoengine.core.scheduler import Step
    from nanoengine.core.sequence import Request, Sequence


class KVLayout(Protocol):
    """What the layers of one KV group remember of a sequence. Called by the block manager."""

    def first_seen(self, position: int) -> int:
        """The first token that the token at `position`, and all behind it, may see."""
        ...

    def reserve(self, start: int, num_tokens: int) -> int:
        """How many tokens a sequence gets room for when it is admitted with `start` cached tokens; its chunks ask for the
        rest.
        """
        ...


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

    def hold(self, group: int, hash: bytes, tokens: bytes) -> None:
        """It is loaded soon: keep it until then."""

    def load(self, group: int, hash: bytes, tokens: bytes, block: int) -> None:
        """Copy what it has into a block of the pool, before the next step computes."""

    def clear(self) -> None:
        """Forget everything. A step follows that carries out what this takes, if a `PlanExtra` wants one."""

    def closing(self) -> None:
        """The engine ends: keep what is in the pool. A last step follows, as behind `clear`."""


class Gate:
    """Says who must give way, which prompts may start now, and how many tokens of each are computed. Called by the scheduler, in
    the order of `Scheduler.gates`.
    """

    def make_way(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> Iterable[Sequence]:
        """Running sequences that must be preempted before the next step is made. Called first in every step."""
        return ()

    def begin_step(self, budget: int) -> None:
        """A step may compute so many tokens of prompts."""

    def candidates(self, waiting: Iterable[Sequence]) -> Iterable[Sequence]:
        """Those of `waiting` that may start now, in the order in which they are tried. The scheduler takes one after the other,
        and what it took may decide who comes next: do not look ahead.
        """
        return waiting

    def allowed(self, seq: Sequence, budget: int) -> int:
        """At most `budget`; 0: none yet."""
        return budget

    def took(self, seq: Sequence, count: int) -> None:
        """So many tokens of it are in the step."""


class Candidate(NamedTuple):
    """A decode that may have drafts."""

    seq: Sequence
    first: int  # the position of its first draft
    most: int  # drafts that it has room for, at least 1


class Drafter(Protocol):
    """Guesses the next tokens of sequences. It cannot change a token, only how many come in a step. Called by the scheduler."""

    def postpone(self, candidates: Iterable[Candidate], num_decodes: int, budget: int) -> Container[Sequence]:
        """Which of these, whose last token is in flight, are left out of a step, so that the next can verify guesses at what
        follows that token. The step would have `num_decodes` decodes; the next may have `budget` drafts.
        """
        ...

    def choose(
        self, candidates: Iterable[Candidate], num_decodes: int, num_tokens: int, budget: int
    ) -> dict[Sequence, list[int]]:
        """The drafts of a step, at most `budget` in all.

        Args:
            candidates: those of its decodes whose tokens are all known. Nothing is done for those that are not looked at.
            num_decodes: in the step.
            num_tokens: that the step has without drafts: decodes, and tokens of prompts.
        """
        ...

    def settle(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """So many of its drafts were accepted. Their tokens come next."""
        ...


class PlanExtra:
    """Adds to a plan what the runner's part of a capability must know. Called by the scheduler for each step."""

    def wants_step(self) -> bool:
        """Whether a step is to be made although it computes nothing."""
        return False

    def complete(self, step: Step) -> None:
        """The plan is made but for this."""


class Listener:
    """Is told what happened. Called by the engine; it must not raise."""

    def submitted(self, request: Request) -> None:
        """It was checked and queued."""

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        """A step was committed, or has failed, or was in flight behind one that has failed (`step.is_dropped`).

        Args:
            seqs: those that got a token, or ended; their new tokens are not text yet.
        """

    def finished(self, seq: Sequence) -> None:
        """It has ended, and so has its text."""
