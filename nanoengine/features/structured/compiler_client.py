"""CompilerClient: compiles each grammar in a limited process first, so that one which takes too much ends only that process."""

from __future__ import annotations

import marshal
import signal
import sys
from typing import NamedTuple

from nanoengine.child_process import ChildProcess, ProcessEnded
from nanoengine.features.structured import compiler_process as limits

COMMAND = [sys.executable, "-I", limits.__file__]

MAX_WAIT = 30.0
"""Seconds until an answer must be there."""

MAX_TRIES = 2
"""For a grammar, each in a new process, where the process may have ended for another reason than this grammar."""

DEATHS: dict[int | None, str] = {
    -signal.SIGPROF: f"takes more than {limits.MAX_SECONDS:g} s to compile",
    -signal.SIGSEGV: "is nested too deeply to be compiled",
    -signal.SIGABRT: f"takes more than {limits.MAX_BYTES >> 20} MiB to compile, or is nested too deeply",
}
"""Faults of a grammar, by the exit status of its process."""


class Verdict(NamedTuple):
    """The reason why a grammar cannot be used, "" if it can; bytes of its matcher; the grammar in llguidance's notation."""

    error: str
    num_bytes: int = 0
    grammar: str = ""


class CompilerUnavailable(Exception):
    """The process cannot be started, whatever the grammar is."""


class CompilerClient:
    """Any thread may call it; one grammar is compiled at a time.

    Args:
        tokenizer, vocab_size, eos_token_ids: as `LLTokenizer` takes them; `limits_of_parser` as `LLParserLimits` does.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: list[int], limits_of_parser: dict[str, int]):
        setup = marshal.dumps((tokenizer, vocab_size, eos_token_ids, limits_of_parser))
        self.process = ChildProcess(COMMAND, max_wait=MAX_WAIT, setup=setup)

    def verdict(self, text: str, notation: str = "llguidance") -> Verdict:
        """Compile a grammar for a trial.

        Args:
            notation: of the text, as `llguidance.grammar_from` names it.

        Raises:
            CompilerUnavailable: no process can be started, or this was closed.
        """
        for _ in range(MAX_TRIES):
            try:
                return Verdict(*marshal.loads(self.process.ask(marshal.dumps((notation, text)))))
            except ProcessEnded as error:
                end = error
            if end.is_set_up and end.status in DEATHS:
                return Verdict(f"the grammar {DEATHS[end.status]}: make it smaller")
        if not end.is_set_up:
            raise CompilerUnavailable(f"the process that compiles grammars cannot be started: it {end}")
        return Verdict(
            f"the grammar was not compiled, in {MAX_TRIES} tries: the process that compiles it {end}; make it smaller, or "
            "ask again"
        )

    def close(self) -> None:
        """End the process. A compilation that is running is not waited for."""
        self.process.close()
