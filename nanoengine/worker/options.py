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
        worker_process: compute in a process of its own. If it dies, it is started anew, and all requests go on from their
            tokens: they get the same as if nothing had happened.
        worker_step_seconds: a step that takes longer hangs: its process is killed. Above 0.
        worker_start_seconds: so does a start that takes longer, the loading of the model included. Above 0.
        worker_silence_seconds: so does a process that gives no sign of life for so long while it starts; it gives one a second,
            unless loading a library holds it up. Above 0.
        worker_start_attempts: a lost worker is started anew so often, until one is ready; then the engine is dead. 1 or more.

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
