"""Executor: what the engine needs of whoever computes; it may live in this process or in another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nanoengine.engine.kv.groups import KVSpec
from nanoengine.engine.messages import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorInfo:
    """Plain data, so that an executor in another process can send it."""

    num_blocks: int
    """Usable blocks of the KV pool: the null block is one more."""

    groups: tuple[KVSpec, ...] = (KVSpec(),)
    """What the layers of each KV group remember."""

    num_host_blocks: int
    """Slots of the host tier; 0: there is none."""

    max_model_len: int
    """Longest sequence in tokens."""

    num_rows: int
    """Sequences that may run at once."""

    block_bytes: int
    """K and V of one block, in all layers of a group."""

    max_steps_in_flight: int
    """Steps that are worth launching before the results of the first are taken."""

    kv_fingerprint: str | None = None
    """Of all that K/V depends on but tokens, in hexadecimal digits; None where no disk tier asks for it."""

    step_seconds: tuple[tuple[int, float], ...] = ()
    """(tokens, seconds) of small steps; none where nobody chooses by it."""

    guess_share: float = 0.0
    """What one guess of a draft model takes of the time of a step with one token."""

    copy_bytes_per_second: float | None = None
    """Between the pool and host memory; None where nobody chooses by it."""


class Launched(Protocol):
    """A plan that was launched."""

    def result(self) -> StepResult:
        """Wait for its end; raises what went wrong in it."""
        ...


class Executor(Protocol):
    """Carries out plans, one after the other."""

    @property
    def info(self) -> ExecutorInfo: ...

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a plan, to be executed after those launched before; it may be over when this returns."""
        ...

    def close(self) -> None: ...
