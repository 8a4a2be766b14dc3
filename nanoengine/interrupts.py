"""InterruptGuard: one thread at a time uses an engine, and Ctrl-C interrupts a computation, never a change of the engine's
state.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FrameType, TracebackType

from nanoengine.core.llm_engine import Executor
from nanoengine.core.messages import Launched, StepPlan, StepResult


@cache
def prepare_forks() -> None:
    """Let forks of this process make engines, which compute in one thread: a fork does not have the threads of torch and of the
    kernels, and would wait for them for ever.
    """
    import torch

    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


class InterruptGuard:
    """Defers KeyboardInterrupt while it is entered; raises it in `allowed` regions, or at the end. Other threads wait.

    Without it a signal could stop the scheduler between the allocation of a block and its record. It does nothing where Ctrl-C
    does not raise KeyboardInterrupt: outside of the main thread, or under a handler of the application.
    """

    def __init__(self) -> None:
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._is_active = self._is_pending = False
        self._is_deferring = True

    def __enter__(self) -> InterruptGuard:
        if os.getpid() != self._pid:  # a thread that the fork does not have may hold it for ever
            self._lock, self._pid = threading.RLock(), os.getpid()
        self._lock.acquire()
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._is_active, self._is_pending, self._is_deferring = True, False, True
            signal.signal(signal.SIGINT, self._handle)  # the last: a signal may come at once
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._is_active:
                return
            self._is_active = False
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._is_pending and not isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt
        finally:
            self._lock.release()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """A region that may be interrupted; its caller handles KeyboardInterrupt."""
        try:
            self._is_deferring = False
            if self._is_active and self._is_pending:
                self._is_pending = False
                raise KeyboardInterrupt
            yield
        finally:
            self._is_deferring = True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_deferring:
            raise KeyboardInterrupt
        self._is_pending = True


class Interruptible:
    """An executor that may be interrupted: the engine handles the KeyboardInterrupt, and all sequences resume."""

    def __init__(self, executor: Executor, guard: InterruptGuard):
        self.executor, self.guard = executor, guard

    def launch(self, plan: StepPlan) -> Launched:
        with self.guard.allowed():
            launched = self.executor.launch(plan)

        def result() -> StepResult:
            with self.guard.allowed():
                return launched()

        return result

    def close(self) -> None:
        self.executor.close()
