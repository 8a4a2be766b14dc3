"""The process that compiles grammars for a trial: `python -I compiler_process.py DESCRIPTOR`. It imports nothing of this package.

llguidance cannot be stopped in the middle of a grammar, and some grammars are too deep for its stack: the process dies. At the
other end of its `multiprocessing.connection` is `CompilerClient`: its first question is a tokenizer, each further one a grammar.
"""

from __future__ import annotations

import contextlib
import ctypes
import marshal
import os
import resource
import signal
import sys
import threading
from multiprocessing.connection import Connection

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from

MAX_SECONDS = 1.0
"""CPU time for the compilation of a grammar and its first mask."""

MAX_BYTES = 1 << 30
"""Memory for a grammar."""

NICENESS = 5
"""Lower priority than the engine's threads; on a busy machine the process goes on all the same."""


def answer_all(connection: Connection) -> None:
    os.nice(NICENESS)
    text, vocab_size, eos_token_ids, limit_values = marshal.loads(connection.recv_bytes())
    tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_ids)
    limits, executor = LLParserLimits(**limit_values), LLExecutor(1)
    words = -(-vocab_size // 32)
    if sys.platform == "linux":
        most = _memory()[0] + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    connection.send_bytes(b"")
    while True:
        notation, text = marshal.loads(connection.recv_bytes())
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        before = _memory()[1]
        try:
            grammar = str(grammar_from(notation, text))
        except ValueError as problem:  # the text is of another notation
            grammar, error, num_bytes = "", str(problem), 0
        else:
            matcher = LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
            num_bytes = max(_memory()[1] - before, 16 * len(grammar))
            if not matcher.is_error():
                bits = (ctypes.c_int32 * words)()
                executor.unsafe_compute_mask_ptr([(matcher, 0)], ctypes.addressof(bits), 4 * words, 1)
                if forced := matcher.compute_ff_tokens():
                    matcher.consume_token(forced[0])  # only this reports a text that is too long
            error = str(matcher.get_error())
            del matcher
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(marshal.dumps((error, num_bytes, "" if notation == "llguidance" else grammar)))


def _memory() -> tuple[int, int]:
    """Bytes of address space and of resident memory, without freed memory."""
    if sys.platform != "linux":
        return 0, 0
    with contextlib.suppress(OSError, AttributeError):  # not every libc has it
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        pages = file.read().split()
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


def _stack_bytes() -> int:
    """Half of the stack of a thread of the engine, which compiles the grammar again. (llguidance's threads have as much.)"""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return (2 << 20 if soft == resource.RLIM_INFINITY else max(1 << 20, min(soft, 64 << 20))) // 2


if __name__ == "__main__":
    threading.stack_size(_stack_bytes())
    thread = threading.Thread(target=answer_all, args=(Connection(int(sys.argv[1])),))
    thread.start()
    thread.join()
