"""InterruptGuard: Ctrl-C lands between two states of the engine, never in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class InterruptGuard:
    """Holds KeyboardInterrupt back while it is entered; raises it in `allowed` regions, or at the end.

    Without it a signal could stop the scheduler between taking a block and noting it. It does nothing where Ctrl-C does not
    raise KeyboardInterrupt anyway: outside the main thread, or under a handler of the application's own.
    """

    def __init__(self) -> None:
        self._active = False
        self._deferring = True
        self._pending = False

    def __enter__(self) -> InterruptGuard:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._pending and error is None:
            raise KeyboardInterrupt

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """A region that may be interrupted; the caller handles KeyboardInterrupt from it."""
        try:
            self._deferring = False
            if self._pending:
                self._pending = False
                raise KeyboardInterrupt
            yield
        finally:
            self._deferring = True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self._deferring:
            raise KeyboardInterrupt
        self._pending = True
