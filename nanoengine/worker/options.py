"""Options of the worker process."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.config import check_bool, check_count
from nanoengine.core.errors import InvalidConfig, shown

MOST_SECONDS = 2_000_000
"""What poll(2) can wait: it counts milliseconds in 31 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of the worker process; all are keyword arguments of `LLM`.

    Args:
        worker_process: compute in a process of its own. If it dies, another process is started, and all requests go on from
            their tokens, with the results of an undisturbed run.
        worker_step_seconds: a process whose step takes longer is killed. Above 0.
        worker_start_seconds: a process whose start takes longer, the loading of the model included, is killed. Above 0.
        worker_silence_seconds: a process that gives no sign of life for so long while it starts is killed; it gives one a second,
            unless loading a library holds it up. Above 0.
        worker_start_attempts: a lost worker is started again at most so many times in a row; then the engine is dead. 1 or more.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    worker_process: bool = False
    worker_step_seconds: float = 300.0
    worker_start_seconds: float = 1800.0
    worker_silence_seconds: float = 60.0
    worker_start_attempts: int = 10

    def __post_init__(self) -> None:
        check_bool("worker_process", self.worker_process)
        check_count("worker_start_attempts", self.worker_start_attempts, 2**20)
        for name in ("worker_step_seconds", "worker_start_seconds", "worker_silence_seconds"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MOST_SECONDS:
                raise InvalidConfig(
                    f"{name} is {shown(seconds)}: it must be above 0 and at most {MOST_SECONDS} seconds"
                )
