"""Options of the worker process."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.config import check_bool
from nanoengine.core.errors import InvalidConfig, shown

MOST_SECONDS = 2_000_000
"""What poll(2) can wait: it counts milliseconds in 31 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of the worker process; all are keyword arguments of `LLM`.

    Args:
        worker_process: compute in a process of its own. If it dies, it is started anew, and all requests go on from their
            tokens: they get the same as if nothing had happened.
        worker_step_seconds: a step that takes longer hangs: its process is killed. Above 0.
        worker_start_seconds: so does a start that takes longer, the loading of the model included. Above 0.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    worker_process: bool = False
    worker_step_seconds: float = 300.0
    worker_start_seconds: float = 1800.0

    def __post_init__(self) -> None:
        check_bool("worker_process", self.worker_process)
        for name in ("worker_step_seconds", "worker_start_seconds"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MOST_SECONDS:
                raise InvalidConfig(
                    f"{name} is {shown(seconds)}: it must be above 0 and at most {MOST_SECONDS} seconds"
                )
