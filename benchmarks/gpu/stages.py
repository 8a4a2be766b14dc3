"""Stages of a call: each a process with a time limit, its log, what it measured, and whether it has to be run again.

It knows nothing of GPUs and imports no torch: it starts at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

GRACE = 10
"""Seconds that a stage has for saving what it found, once it is interrupted."""

LOG_END = 60_000
"""Bytes of a stage's log that are kept: the last ones say most."""

DONE, LEFT_OUT = "done", "left out"


@dataclass(frozen=True)
class Stage:
    """One process.

    Args:
        name: unique in its call.
        seconds: its share of the call's time. What a stage does not need, those after it may use.
        command: what is run.
        saves: whether it writes a report to the file behind `--save`.
        vital: where it fails, nothing that follows means anything.
        program: what it cannot do without; where that is not installed the stage is left out.
        environment: variables that only it gets.
    """

    name: str
    seconds: int
    command: Sequence[str]
    saves: bool = False
    vital: bool = False
    program: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class Ledger:
    """What the stages of all calls have come to, in OUT/figures.json; the ends of their logs, in OUT/logs.txt.

    While a stage runs, its own files lie in OUT/work. Those of a call that was killed are taken over by the next one.
    """

    def __init__(self, out: Path):
        self.path, self.logs, self.work = out / "figures.json", out / "logs.txt", out / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        self.calls: dict[str, dict[str, Any]] = json.loads(self.path.read_text()) if self.path.exists() else {}
        for log in sorted(self.work.glob("*.log")):
            call, _, name = log.stem.partition(".")
            self.close(call, name, "killed, with the call", 0.0)

    def files(self, call: str, name: str) -> tuple[Path, Path]:
        """The log and the report of a stage that runs."""
        return self.work / f"{call}.{name}.log", self.work / f"{call}.{name}.json"

    def close(self, call: str, name: str, state: str, seconds: float) -> None:
        """Take a stage's files over. A report of an earlier run stays if this one made none."""
        log, saved = self.files(call, name)
        entry = self.calls.setdefault(call, {}).setdefault(name, {})
        text = log.read_text(errors="replace") if log.exists() else ""
        entry |= {"state": state, "seconds": round(seconds, 1), "words": _last_words(text), "notes": _notes(text)}
        with contextlib.suppress(OSError, ValueError):  # there is none, or it was cut short
            entry["report"] = json.loads(saved.read_text())
        self.note(f"{call}: {name}: {state} after {seconds:.0f} s", text)
        self.save()
        for path in (log, saved):
            path.unlink(missing_ok=True)

    def note(self, title: str, text: str) -> None:
        with self.logs.open("a") as file:
            file.write(f"\n==== {title}\n{text[-LOG_END:]}\n")

    def finish(self) -> None:
        """Leave no empty folder."""
        with contextlib.suppress(OSError):
            self.work.rmdir()

    def save(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.calls, indent=1) + "\n")
        os.replace(new, self.path)  # at once: whoever stops the call loses nothing

    def state(self, call: str, name: str) -> str | None:
        entry = self.calls.get(call, {}).get(name)
        return None if entry is None else str(entry["state"])

    def reports(self, *calls: str) -> Iterator[dict[str, Any]]:
        """Those of the calls, the first call's first."""
        for call in calls:
            yield from (entry["report"] for entry in self.calls.get(call, {}).values() if "report" in entry)


def run_stages(call: str, stages: Sequence[Stage], ledger: Ledger, redo: Collection[str]) -> Stage | None:
    """Run those that are not done; returns the vital one that failed, if one did."""
    deadline = monotonic()
    for stage in stages:
        deadline += stage.seconds
        if ledger.state(call, stage.name) == DONE and stage.name not in redo:
            print(f"== {stage.name}: done before", flush=True)
            continue
        began = monotonic()
        limit = deadline - began
        print(f"== {stage.name} (at most {limit:.0f} s)", flush=True)
        log, saved = ledger.files(call, stage.name)
        command = [*stage.command, *(["--save", str(saved)] if stage.saves else [])]
        state = LEFT_OUT
        if stage.program is None or shutil.which(stage.program):
            state = run(command, limit, log, os.environ | stage.environment)
        else:
            log.write_text(f"left out: {stage.program} is not installed\n")
        ledger.close(call, stage.name, state, monotonic() - began)
        print(f"   {state}: {ledger.calls[call][stage.name]['words']}", flush=True)
        if stage.vital and state != DONE:
            return stage
    return None


def run(command: Sequence[str], limit: float, log: Path, environment: Mapping[str, str]) -> str:
    """How a command ended: it is interrupted at its limit, to save what it has, and killed later, with all that it started."""
    if limit <= 0:
        log.write_text("those before it left it no time\n")
        return "no time"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=dict(environment), start_new_session=True
        )
        state = f"cut after {limit:.0f} s"
        try:
            code = process.wait(limit)
            state = DONE if code == 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return state


def _last_words(text: str) -> str:
    """The last line that is prose."""
    prose = (line.strip() for line in reversed(text.splitlines()) if re.match(r"\s*[^\s{}]", line))
    return next(prose, "")[:160]


def _notes(text: str, most: int = 20) -> list[str]:
    """What should not be overlooked: tests that failed, and what was left out."""
    wanted = re.compile(r"FAILED|ERROR |warning: |left out: ")
    return [line[:250] for line in text.splitlines() if wanted.match(line)][:most]
