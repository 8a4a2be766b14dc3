"""The process that compiles grammars may be slow, silent, stopped or killed: a verdict is never another grammar's."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nanoengine import child_process
from nanoengine.errors import EngineClosed, GrammarsUnavailable, InvalidSamplingParams
from nanoengine.features.structured import compiler_client
from nanoengine.features.structured.compiler_client import CompilerClient, CompilerUnavailable, Verdict
from nanoengine.features.structured.grammars import Grammars
from nanoengine.features.structured.mask_filling import GrammarPolicy
from nanoengine.features.structured.params import StructuredOutputs
from nanoengine.serve.server.errors import api_error_of
from tests.features.structured.demo import demo_grammars

STAND_IN = """
import json, marshal, os, signal, sys, time
from multiprocessing.connection import Connection

folder, descriptor = sys.argv[1:]
with open(folder + "/pids", "a") as file:
    print(os.getpid(), file=file)


def draw():
    with open(folder + "/faults") as file:
        faults = json.load(file)
    with open(folder + "/faults", "w") as file:
        json.dump(faults[1:], file)
    return faults[0] if faults else "none"


connection = Connection(int(descriptor))
while True:
    value = marshal.loads(connection.recv_bytes())
    fault = draw()
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
    elif fault == "slow":
        time.sleep(0.4)
    elif fault == "exit":
        os._exit(3)
    if len(value) == 4:
        connection.send_bytes(b"")
    else:
        text = value[1]
        connection.send_bytes(marshal.dumps(("it is bad: " + text if "bad" in text else "", len(text), text)))
"""
"""Answers as the process does, and makes the mistakes that a file names, one for each question."""

FAULTS = ("exit", "SIGKILL", "SIGTERM")
COSTLY = ("slow", "SIGSTOP")
"""They are waited for."""


class StandIn:
    """A client whose process is the stand-in."""

    def __init__(self, folder: Path):
        self.folder, self.client = folder, CompilerClient("", 1, [0], {})
        self.plan()

    def plan(self, *faults: str) -> None:
        """Of the next questions; how it starts is the first, if it has not been started."""
        (self.folder / "faults").write_text(json.dumps(faults))

    def ask(self, text: str) -> Verdict | None:
        """None: there is no process."""
        with suppress(CompilerUnavailable):
            return self.client.verdict(text)
        return None

    def is_gone(self) -> bool:
        return not any(Path(f"/proc/{pid}").exists() for pid in (self.folder / "pids").read_text().split())


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(compiler_client, "COMMAND", [sys.executable, "-I", "-S", "-c", STAND_IN, str(tmp_path)])
    monkeypatch.setattr(child_process, "MAX_DYING", 0.1)
    own = StandIn(tmp_path)
    yield own
    own.client.close()
    assert own.is_gone()


def right(text: str) -> Verdict:
    return Verdict(f"it is bad: {text}" if "bad" in text else "", len(text), text)


def test_whatever_the_process_does_a_verdict_is_of_the_grammar_that_was_asked_for(
    stand_in: StandIn,
) -> None:
    rng, num_right = random.Random(1), 0
    for number in range(18):
        stand_in.client.process.max_wait = 0.2
        faults = [rng.choice(["none", "none", *FAULTS]) for _ in range(rng.randrange(4))]
        if number % 4 == 0:
            faults[:1] = [COSTLY[number // 4 % 2]]
        stand_in.plan(*faults)
        text = f"{rng.choice(['good', 'bad'])} {number}"
        verdict = stand_in.ask(text)
        num_right += verdict == right(text)
        assert (
            verdict is None
            or verdict == right(text)
            or verdict.error.startswith("the grammar was not compiled, in 2 tri")
        )
        stand_in.plan()
        stand_in.client.process.max_wait = 30.0
        assert stand_in.ask(text) == right(text), "nothing of it is left"
    assert num_right > 3


@pytest.mark.parametrize("death", ["SIGKILL", "SIGTERM", "exit"])
def test_a_grammar_is_tried_once_more_where_somebody_else_may_have_ended_its_process(
    stand_in: StandIn, death: str
) -> None:
    stand_in.plan("none", death)
    assert stand_in.ask("good") == right("good")
    stand_in.plan(death, "none", death)
    verdict = stand_in.ask("good")
    assert verdict is not None
    assert verdict.error.startswith("the grammar was not compiled, in 2 tries: the process that compiles it ")
    assert ("ended with status 3" if death == "exit" else f"was ended by {death}") in verdict.error
    assert stand_in.ask("bad") == right("bad")


def test_what_a_grammar_does_to_its_process_is_its_own_fault_at_once(stand_in: StandIn) -> None:
    stand_in.plan("none", "SIGSEGV")
    verdict = stand_in.ask("good")
    assert verdict is not None
    assert verdict.error == "the grammar is nested too deeply to be compiled: make it smaller"
    assert len((stand_in.folder / "pids").read_text().split()) == 1


def test_a_process_that_cannot_be_started_is_nobodys_fault(stand_in: StandIn) -> None:
    stand_in.plan("exit", "exit")
    with pytest.raises(CompilerUnavailable, match="cannot be started: it ended with status 3"):
        stand_in.client.verdict("good")
    assert stand_in.ask("good") == right("good")


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    own = demo_grammars()
    yield own
    own.close()


def test_a_process_that_was_killed_while_nothing_was_asked_is_missed_by_nobody(grammars: Grammars) -> None:
    grammars.matcher(StructuredOutputs(regex="a"))
    assert grammars._compiler is not None
    process = grammars._compiler.process
    for regex in ("b", "c"):
        assert process.process is not None
        os.kill(process.process.pid, signal.SIGKILL)
        if regex == "b":
            grammars.matcher(StructuredOutputs(regex=regex))
    process.command = ["/nowhere/python"]
    with pytest.raises(GrammarsUnavailable, match=r"cannot be started: .*No such file") as raised:
        grammars.matcher(StructuredOutputs(regex="c"))
    assert api_error_of(raised.value).status == 503
    process.command = compiler_client.COMMAND
    grammars.matcher(StructuredOutputs(regex="c"))
    GrammarPolicy(grammars).close()  # as the engine closes its parts
    with pytest.raises(EngineClosed):
        grammars.matcher(StructuredOutputs(regex="a"))


def test_the_translation_of_a_grammar_takes_its_time_in_the_process(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the square of some lengths: hours for this text."""
    monkeypatch.setattr("llguidance._grammar_from.any_to_lark", None)  # here, not there
    with pytest.raises(InvalidSamplingParams, match="grammar: the grammar takes more than 1 s to compile"):
        grammars.matcher(StructuredOutputs(grammar="\n" * 400_000))
