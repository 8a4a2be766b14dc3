"""Options of the worker process."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.options import check, option

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
    worker_step_seconds: float = option(300.0, 0, MOST_SECONDS, above=True)
    worker_start_seconds: float = option(1800.0, 0, MOST_SECONDS, above=True)
    worker_silence_seconds: float = option(60.0, 0, MOST_SECONDS, above=True)
    worker_start_attempts: int = option(10, high=2**20)

    def __post_init__(self) -> None:
        check(self)
