from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nanoengine.engine.interrupts import InterruptGuard


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    """The handler that a plain Python program has, whatever the test runner installed."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def in_a_thread(work: Callable[[], Any]) -> list[Any]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results


def test_without_an_interrupt_nothing_happens() -> None:
    with InterruptGuard() as guard, guard.allowed():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_waits_for_the_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), InterruptGuard():  # noqa: PT012 - what comes after the signal is the point
        press_ctrl_c()
        done.append("the rest")
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_several_interrupts_are_one() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), InterruptGuard():  # noqa: PT012
        press_ctrl_c()
        press_ctrl_c()
        done.append("the rest")
    assert done == ["the rest"]


def test_an_interrupt_in_an_allowed_region_is_raised_there() -> None:
    seen = []
    with InterruptGuard() as guard:
        try:
            with guard.allowed():
                press_ctrl_c()
                seen.append("not reached")
        except KeyboardInterrupt:
            seen.append("handled")
    assert seen == ["handled"], "and not raised a second time at the end"


def test_an_interrupt_before_an_allowed_region_is_raised_at_its_beginning() -> None:
    seen = []
    with InterruptGuard() as guard:
        press_ctrl_c()
        seen.append("before")
        try:
            with guard.allowed():
                seen.append("not reached")
        except KeyboardInterrupt:
            seen.append("handled")
    assert seen == ["before", "handled"]


def test_after_an_allowed_region_interrupts_wait_again() -> None:
    seen = []
    with pytest.raises(KeyboardInterrupt), InterruptGuard() as guard:  # noqa: PT012
        with guard.allowed():
            pass
        press_ctrl_c()
        seen.append("the rest")
    assert seen == ["the rest"]


def test_a_second_allowed_region_can_be_interrupted_too() -> None:
    count = 0
    with InterruptGuard() as guard:
        for _ in range(2):
            try:
                with guard.allowed():
                    press_ctrl_c()
            except KeyboardInterrupt:
                count += 1
    assert count == 2


def test_an_error_in_an_allowed_region_leaves_interrupts_waiting() -> None:
    seen = []
    with pytest.raises(KeyboardInterrupt), InterruptGuard() as guard:  # noqa: PT012
        try:
            with guard.allowed():
                raise ValueError
        except ValueError:
            press_ctrl_c()
            seen.append("the rest")
    assert seen == ["the rest"]


def test_an_error_is_not_hidden_by_an_interrupt() -> None:
    with pytest.raises(ValueError, match="mine"), InterruptGuard():  # noqa: PT012
        press_ctrl_c()
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_applications_own_handler_is_left_alone() -> None:
    calls = []
    handler = lambda *_: calls.append("mine")  # noqa: E731
    signal.signal(signal.SIGINT, handler)
    with InterruptGuard() as guard:
        assert signal.getsignal(signal.SIGINT) is handler
        press_ctrl_c()
        with guard.allowed():
            press_ctrl_c()
    assert calls == ["mine", "mine"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with InterruptGuard() as guard, guard.allowed():
        press_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_outside_the_main_thread_it_does_nothing() -> None:
    def work() -> object:
        with InterruptGuard() as guard, guard.allowed():
            return signal.getsignal(signal.SIGINT)

    assert in_a_thread(work) == [signal.default_int_handler]
