"""Ctrl-C beside an engine: at whatever moment it comes, it is raised once, and never inside of what it must not divide."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nanoengine import interrupts
from nanoengine.interrupts import InterruptGuard


@contextmanager
def signal_at(moment: int) -> Iterator[list[int]]:
    """Sends SIGINT before instruction number `moment` of what follows; yields a list that has an item once it did."""
    sent: list[int] = []
    left = moment

    def trace(frame: Any, event: str, _argument: Any) -> Callable[..., Any] | None:
        nonlocal left
        if frame.f_code.co_filename not in (interrupts.__file__, __file__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not sent:
            left -= 1
            if left < 0:
                sent.append(moment)
                os.kill(os.getpid(), signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        yield sent
    finally:
        sys.settrace(None)


def guarded(guard: InterruptGuard, done: list[str], error: Exception | None) -> None:
    with guard:
        done.append("first half")
        done.append("second half")
        with guard.allowed():
            done.append("allowed")
        if error is not None:
            raise error
    done.append("behind")


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("error", [None, ValueError("some error")])
def test_ctrl_c_is_never_lost_nor_between_two_halves(error: Exception | None) -> None:
    guard, moment, num_allowed = InterruptGuard(), 0, 0
    while True:
        done: list[str] = []
        try:
            with signal_at(moment) as sent:
                guarded(guard, done, error)
        except ValueError:
            assert not sent, f"Ctrl-C at instruction {moment} is lost"
        except KeyboardInterrupt:
            num_allowed += done[-1:] == ["allowed"]
            assert done != ["first half"]
        else:
            assert not sent, f"Ctrl-C at instruction {moment} is lost"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not sent:
            break
        moment += 1
    assert num_allowed > 10
