"""A gate before an engine's steps, for tests that say when each may be taken."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.request import Request

PATIENCE = 30.0
"""Seconds after which a test that waits is wrong; right ones wait for as long as the other thread takes."""


class Gate:
    """Holds the steps of an engine that another thread runs. It is open at first.

    Args:
        engine: nothing else changes its `step`.
        after_step: called in the engine's thread, when a step was taken.
    """

    def __init__(self, engine: LLMEngine, after_step: Callable[[], object] = lambda: None):
        self.num_steps = 0  # that were taken
        self.error: BaseException | None = None  # what the next step raises, in the place of a step
        self._engine = engine
        self._step = engine.step
        self._after_step = after_step
        self._permits: int | None = None  # None: all
        self._num_waiting = 0
        self._changed = threading.Condition()
        engine.step = self._gated_step  # type: ignore[method-assign]

    def shut(self) -> None:
        with self._changed:
            self._permits = 0

    def let(self, count: int = 1) -> None:
        """Let so many more steps be taken."""
        with self._changed:
            assert self._permits is not None, "it is open"
            self._permits += count
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._permits = None
            self._changed.notify_all()

    def wait_until_held(self) -> None:
        """Wait until the engine stands before a step that it may not take."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_waiting > 0 and self._permits == 0, PATIENCE)

    def _gated_step(self) -> list[Request]:
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._permits is None or self._permits > 0, PATIENCE)
            self._num_waiting -= 1
            if self._permits is not None:
                self._permits -= 1
        if self.error is not None:
            raise self.error
        touched = self._step()
        self.num_steps += 1
        self._after_step()
        return touched
