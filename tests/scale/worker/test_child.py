"""Processes that this one starts: where they find their modules, how they end, and what they raise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanoengine.errors import StepFailed
from nanoengine.scale.worker.child import ending_of, portable, start_child


@pytest.mark.parametrize("module", ["nanoengine.scale.worker.process", "nanoengine.scale.replicas.process"])
def test_a_child_runs_nothing_that_lies_in_the_working_folder(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the folder of a model, or a user's own, with files that have the names of modules."""
    mark = tmp_path / "mark"
    for name in ("queue", "logging", "json", "torch", "nanoengine"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep)  # an empty entry is the working folder, too
    process, own = start_child(module)
    own.close()  # whoever finds that nobody speaks to it ends
    assert process.wait(60) != 7
    assert not mark.exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise SystemExit(7)", "has ended with exit code 7"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 35)", "was killed by signal 35"),
        ("import time; print(flush=True); time.sleep(60)", "has closed its socket"),
    ],
)
def test_how_a_process_ended_is_told(script: str, message: str) -> None:
    with subprocess.Popen([sys.executable, "-S", "-E", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        assert ending_of(process) == message
        process.kill()


def test_errors_that_cannot_be_sent_say_what_they_said() -> None:
    error = StepFailed("it went wrong", [])
    error.outputs = lambda: None  # type: ignore[assignment]
    assert "StepFailed: it went wrong" in str(portable(error))
    assert type(portable(ValueError("plain"))) is ValueError
