"""gpu.sh: what it runs and what is left of that, with a stand-in for Python; and the programs themselves, in miniature."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.random_weights import SHAPES

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
MOST_FILES = 8

STAND_IN = r"""#!/usr/bin/env bash
# Notes its arguments, and saves a report where --save says; $FAIL is a word of a command that fails.
printf '%s\x1f' "$@" >>"$NOTES"
echo >>"$NOTES"
while (($#)); do
    [[ ${FAIL:-} && $1 == *$FAIL* ]] && { echo "FAILED $1"; exit 3; }
    [[ $1 == --save ]] && echo '{"rows": [{"case": {"work": "workload"}, "figures": {"output_tok_s": {"median": 5}}}]}' >"$2"
    shift
done
echo "the end"
"""


class Script:
    """gpu.sh with a stand-in for Python."""

    def __init__(self, folder: Path):
        self.out, self.python, self.notes = folder / "out", folder / "python", folder / "notes"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def __call__(self, call: str, **variables: str) -> subprocess.CompletedProcess[str]:
        self.notes.write_text("")
        own = {"PYTHON": str(self.python), "NOTES": str(self.notes), "MINIATURE": "1", "TMPDIR": str(self.out.parent)}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")} | own
        command = ["bash", str(SCRIPT), call, str(self.out)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment | variables)

    def commands(self) -> list[list[str]]:
        """Of the programs that it has run, in their order."""
        return [line.split("\x1f")[:-1] for line in self.notes.read_text().splitlines() if line.startswith("-m")]

    def names(self) -> list[str]:
        return [command[1].rpartition(".")[2] for command in self.commands()]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


CHOOSE = ["choose", "choose", "engine", "engine", "engine", "peers", "table"]


def test_a_call_and_the_same_call_again(script: Script) -> None:
    result = script("choose")
    assert result.returncode == 0, result.stdout + result.stderr
    assert script.names() == CHOOSE
    assert re.search(r"^after: exit 0 after \d+ s: the end$", result.stdout, re.MULTILINE)
    reports = dict(line.split("\t", 1) for line in (script.out / "figures.tsv").read_text().splitlines())
    assert list(reports) == ["choose", "before", "after", "int8kv", "peers"]
    assert all(json.loads(report)["rows"] for report in reports.values())
    files = [path for path in script.out.rglob("*") if path.is_file()]
    assert len(files) < MOST_FILES, "the tuning is one more"
    assert not list(script.out.parent.glob("tmp*")), "what is left behind"
    assert script("choose").stdout.count("done before") == len(CHOOSE) - 1
    assert script.names() == ["table"]


def test_after_a_stage_that_failed_it_goes_on_there(script: Script) -> None:
    assert script("choose", FAIL="kv_cache_dtype=int8").returncode == 0
    assert script.names() == CHOOSE, "others do not hang on it"
    assert script("choose").stdout.count("int8kv: exit 0") == 1
    assert script.names() == ["engine", "table"]
    (script.out / "done.txt").unlink()
    failed = script("choose", FAIL="gpu.choose")
    assert failed.returncode == 3
    assert "FAILED benchmarks.gpu.choose" in failed.stdout
    assert script.names() == ["choose", "choose"], "without a choice nothing that follows means anything"


def test_every_test_of_the_gpu_is_run(script: Script) -> None:
    script("tests")
    run = [argument for command in script.commands() for argument in command if argument.startswith("tests/")]
    assert {path for path in run if path.startswith("tests/gpu/")} == {
        f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")
    }
    assert all((ROOT / path).exists() for path in run)


def test_what_cannot_be_run_is_refused(script: Script) -> None:
    assert subprocess.run(["bash", str(SCRIPT)], capture_output=True, check=False).returncode == 1
    assert script("figures").returncode == 2
    refused = script("tests", MINIATURE="", FAIL="cuda")
    assert refused.returncode == 2
    assert "torch sees no NVIDIA GPU" in refused.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is made for Linux on x86-64 alone")
@pytest.mark.parametrize("stage", ["choose", "after", "int8kv", "peers"])
def test_programs_run_on_a_cpu(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """As the script would start them, in this process, which saves them their imports. Outputs are few: each of their tiles is a
    program of its own, and the interpreter runs one after the other.
    """
    few = {"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setitem(SHAPES, "tiny", SHAPES["tiny"] | few | {"intermediate_size": 64})
    script("choose")
    *_, command = (own for own in script.commands() if any(argument.endswith(f"/{stage}.json") for argument in own))
    arguments = [str(tmp_path / "report") if own.endswith(".json") else own for own in command[2:]]
    assert importlib.import_module(command[1]).main(arguments) == 0
    report = json.loads((tmp_path / "report").read_text())
    assert report["rows"]
    if stage == "choose":
        (tuning,) = (script.out / "tuning").iterdir()
        assert json.loads(tuning.read_text()) == report["chosen"]


def test_packages_that_are_brought_along_are_found(script: Script, tmp_path: Path) -> None:
    """As files on a path with a space in it; what is not there is passed over."""
    folder = tmp_path / "some wheels"
    (folder / "nvidia_cutlass_dsl" / "dsl_packages" / "cutlass").mkdir(parents=True)
    show = tmp_path / "show"
    show.write_text(f'#!/bin/sh\necho "$PYTHONPATH" >"{tmp_path}/path"\nexec "{script.python}" "$@"\n')
    show.chmod(0o755)
    assert script("choose", PYTHON=str(show), WHEELS=str(folder)).returncode == 0
    found = (tmp_path / "path").read_text().strip().split(":")
    assert found[-2:] == [str(folder), str(folder / "nvidia_cutlass_dsl" / "dsl_packages")]
