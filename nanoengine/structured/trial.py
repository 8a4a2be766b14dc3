"""Trial: compiles each grammar in a process of its own first, so that one which takes too much ends nothing but that process.

llguidance cannot be stopped in the middle of a grammar, and some are so deep that its stack does not hold them: the process dies.

`python -I trial.py` is that process. It reads a line of JSON, the tokenizer, then a line for each grammar, and answers each with
a line. It imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

MAX_SECONDS = 1.0
"""Of a CPU, that a grammar may take to be compiled, with its first mask."""

MAX_WAIT = 30.0
"""Seconds until an answer must be there, on however busy a machine."""

MAX_BYTES = 1 << 30
"""Of memory that the process may take for a grammar."""

NICENESS = 19
"""What others compute goes first."""

DEATHS: dict[int, str] = {
    signal.SIGPROF: f"takes more than {MAX_SECONDS:g} s to compile",
    signal.SIGSEGV: "is nested too deeply to be compiled",
    signal.SIGABRT: f"takes more than {MAX_BYTES >> 20} MiB to compile, or is nested too deeply",
}


class Verdict(NamedTuple):
    """Why a grammar cannot be used, "" if it can, and how many bytes its matcher takes."""

    error: str
    num_bytes: int


class Trial:
    """Any thread may ask; one grammar is tried at a time.

    Args:
        tokenizer: what `LLTokenizer` takes, and `limits` what `LLParserLimits` takes.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: list[int], limits: dict[str, int]):
        beginning = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eos": eos_token_ids, "limits": limits}
        self._beginning = json.dumps(beginning)
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._at_end: Callable[[], object] = lambda: None

    def verdict(self, grammar: str) -> Verdict:
        """Try a grammar."""
        with self._lock:
            process = self._process or self._begin()
            try:
                found = self._ask(process, json.dumps(grammar))
            except BaseException:  # nobody knows what it would answer next
                self._end()
                raise
            if found is not None:
                return Verdict(*json.loads(found))
            self._end()
            reason = DEATHS.get(-process.returncode, f"ends its compiler (status {process.returncode})")
            return Verdict(f"the grammar {reason}: make it smaller", 0)

    def _begin(self) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = process = subprocess.Popen([sys.executable, "-I", __file__], text=True, **pipes)
        self._at_end = weakref.finalize(self, _end, process)
        self._ask(process, self._beginning)
        return process

    def _ask(self, process: subprocess.Popen[str], line: str) -> str | None:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # why is seen below
            print(line, file=process.stdin, flush=True)
        is_there, _, _ = select.select([process.stdout], [], [], MAX_WAIT)
        answer = process.stdout.readline() if is_there else ""
        return answer or None

    def _end(self) -> None:
        if self._process is not None:
            self._process = None
            self._at_end()


def _end(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # it may be dead
            process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it may be dying, of what is worth to know
        process.wait(0.5)
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


# ---- in the process


def answer_all() -> None:
    os.nice(NICENESS)
    table = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(table["tokenizer"], n_vocab=table["vocab_size"], eos_token=table["eos"])
    limits, executor = LLParserLimits(**table["limits"]), LLExecutor(1)
    words = -(-table["vocab_size"] // 32)
    if sys.platform == "linux":
        most = _memory()[0] + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    print("ready", flush=True)
    for line in sys.stdin:
        grammar = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        before = _memory()[1]
        matcher = LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
        num_bytes = max(_memory()[1] - before, 16 * len(grammar))
        if not matcher.is_error():
            bits = (ctypes.c_int32 * words)()
            executor.unsafe_compute_mask_ptr([(matcher, 0)], ctypes.addressof(bits), 4 * words, 1)
            matcher.compute_ff_tokens()
        error = str(matcher.get_error())
        del matcher
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps([error, num_bytes]), flush=True)


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
    thread = threading.Thread(target=answer_all)
    thread.start()
    thread.join()
