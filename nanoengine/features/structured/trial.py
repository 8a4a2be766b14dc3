"""Trial: compiles each grammar in a process of its own first, so that one which takes too much ends nothing but that process.

llguidance cannot be stopped in the middle of a grammar, and some are so deep that its stack does not hold them: the process dies.

`python -I trial.py DESCRIPTOR` is that process, at the other end of a `multiprocessing.connection`. It is told a tokenizer, then
grammars, and answers each before the next is sent. It imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from

COMMAND = [sys.executable, "-I", __file__]

MAX_SECONDS = 1.0
"""Of a CPU, that a grammar may take to be compiled, with its first mask."""

MAX_WAIT = 30.0
"""Seconds until an answer must be there, on however busy a machine."""

MAX_DYING = 0.5
"""Seconds that a process has to end by itself: how it does so tells what it died of."""

MAX_TRIES = 2
"""Of a grammar, each in a new process, where the process may have ended for another reason than this grammar."""

MAX_BYTES = 1 << 30
"""Of memory that the process may take for a grammar."""

NICENESS = 5
"""What others compute goes first, and on a busy machine this goes on all the same."""

DEATHS: dict[int, str] = {
    signal.SIGPROF: f"takes more than {MAX_SECONDS:g} s to compile",
    signal.SIGSEGV: "is nested too deeply to be compiled",
    signal.SIGABRT: f"takes more than {MAX_BYTES >> 20} MiB to compile, or is nested too deeply",
}
"""What a grammar does to its process."""


class Verdict(NamedTuple):
    """Why a grammar cannot be used, "" if it can; how many bytes its matcher takes; and the grammar in llguidance's notation."""

    error: str
    num_bytes: int = 0
    grammar: str = ""


class TrialFailed(Exception):
    """There is no process that could try a grammar, which is not the fault of the grammar."""


class Trial:
    """Any thread may ask; one grammar is tried at a time.

    Args:
        tokenizer: what `LLTokenizer` takes, and `limits` what `LLParserLimits` takes.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: list[int], limits: dict[str, int]):
        self._beginning = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eos": eos_token_ids, "limits": limits}
        self._process: _Process | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def verdict(self, text: str, notation: str = "llguidance") -> Verdict:
        """Try a grammar.

        Args:
            notation: of the text, as `llguidance.grammar_from` names it.

        Raises:
            TrialFailed: no process can be started, or this was closed.
        """
        reason = ""
        with self._lock:
            for _ in range(MAX_TRIES):
                has_begun = False
                try:
                    process = self._begun()
                    has_begun = True
                    return Verdict(*process.ask((notation, text)))
                except (OSError, EOFError) as error:  # gone, or silent
                    status = self._end()
                    if has_begun and status is not None and -status in DEATHS:
                        return Verdict(f"the grammar {DEATHS[-status]}: make it smaller")
                    reason = f"{_words(status)} ({error})"
                except BaseException:  # nobody knows what it would answer next
                    self._end()
                    raise
        if not has_begun:
            raise TrialFailed(f"the process that compiles grammars cannot be started: it {reason}")
        return Verdict(
            f"the grammar was not compiled, in {MAX_TRIES} tries: the process that compiles it {reason}; make it smaller, or "
            "ask again"
        )

    def close(self) -> None:
        """End the process. Nothing is tried any more, and what is being tried is not waited for."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.own.kill()
        with self._lock:
            self._end()

    def _begun(self) -> _Process:
        if self._process is not None and self._process.own.poll() is not None:  # somebody else has ended it
            self._end()
        if self._process is None:
            if self._is_closed:
                raise TrialFailed("the engine is closed: make a new one")
            self._process = _Process()
            self._process.ask(self._beginning)
        return self._process

    def _end(self) -> int | None:
        """Its status, if it has ended by itself or by others."""
        process, self._process = self._process, None
        return None if process is None else process.end()


class _Process:
    """The process from here. What it raises says that it is of no more use."""

    def __init__(self) -> None:
        self.connection, its = Pipe()
        with its:
            try:
                command, descriptors = [*COMMAND, str(its.fileno())], (its.fileno(),)
                silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                self.own = subprocess.Popen(command, pass_fds=descriptors, **silent)  # type: ignore[call-overload]
            except BaseException:
                self.connection.close()
                raise
        self.end: Callable[[], int | None] = weakref.finalize(self, _end, self.own, self.connection)

    def ask(self, value: object) -> Any:
        """The answer to this question.

        Raises:
            OSError, EOFError: it has ended, or does not answer in time.
        """
        self.connection.send(value)
        if not self.connection.poll(MAX_WAIT):
            raise TimeoutError(f"no answer after {MAX_WAIT:g} s")
        return self.connection.recv()


def _end(process: subprocess.Popen[bytes], connection: Connection) -> int | None:
    connection.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(MAX_DYING)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a disk cannot be killed now
        process.wait(MAX_WAIT)
    return None


def _words(status: int | None) -> str:
    if status is None:
        return "did not go on"
    return f"ended with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"


# ---- in the process


def answer_all(connection: Connection) -> None:
    os.nice(NICENESS)
    table = connection.recv()
    tokenizer = LLTokenizer(table["tokenizer"], n_vocab=table["vocab_size"], eos_token=table["eos"])
    limits, executor = LLParserLimits(**table["limits"]), LLExecutor(1)
    words = -(-table["vocab_size"] // 32)
    if sys.platform == "linux":
        most = _memory()[0] + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    connection.send(None)
    while True:
        notation, text = connection.recv()
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        before = _memory()[1]
        try:
            grammar = str(grammar_from(notation, text))
        except ValueError as problem:  # of another notation than it seems to be
            grammar, error, num_bytes = "", str(problem), 0
        else:
            matcher = LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
            num_bytes = max(_memory()[1] - before, 16 * len(grammar))
            if not matcher.is_error():
                bits = (ctypes.c_int32 * words)()
                executor.unsafe_compute_mask_ptr([(matcher, 0)], ctypes.addressof(bits), 4 * words, 1)
                if forced := matcher.compute_ff_tokens():
                    matcher.consume_token(forced[0])  # only this tells of a text that is too long
            error = str(matcher.get_error())
            del matcher
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send((error, num_bytes, "" if notation == "llguidance" else grammar))


def _memory() -> tuple[int, int]:
    """Bytes of address space and of memory, what was given back left out."""
    if sys.platform != "linux":
        return 0, 0
    with contextlib.suppress(OSError, AttributeError):  # not every libc has it
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        pages = file.read().split()
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


def _stack_bytes() -> int:
    """Half of what a thread has in which the grammar will be compiled again. (Those of llguidance, for masks, are alike.)"""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return (2 << 20 if soft == resource.RLIM_INFINITY else max(1 << 20, min(soft, 64 << 20))) // 2


if __name__ == "__main__":
    threading.stack_size(_stack_bytes())
    thread = threading.Thread(target=answer_all, args=(Connection(int(sys.argv[1])),))
    thread.start()
    thread.join()
