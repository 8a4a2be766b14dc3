"""Stages of gpu.sh: how they end, what is kept of them, and how compiled kernels travel."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import archive
from benchmarks.gpu import stages as gpu_stages
from benchmarks.gpu.stages import DONE, LEFT_OUT, Ledger, Stage, run_stages

SAVE = """
import json, sys, time
json.dump({"rows": [1]}, open(sys.argv[-1], "w"))
print("{'no': 'prose'}")
"""
CUT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
try:
    print("begun", flush=True)
    time.sleep(60)  # whoever waits for its end, finds other last words
except KeyboardInterrupt:
    print("saved what there was")
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def test_what_stages_come_to(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    stages = [
        Stage("good", 20, python(SAVE), saves=True),
        Stage("absent", 1, ["no-such-program"], program="no-such-program"),
        Stage("bad", 20, python("print('FAILED this'); print('the end'); raise SystemExit(3)")),
        Stage("own", 20, python("import os; print(os.environ['OWN'])"), environment={"OWN": "its own"}),
    ]
    assert run_stages("figures", stages, ledger, ()) is None
    found = json.loads(ledger.path.read_text())["figures"]
    assert [entry["state"] for entry in found.values()] == [DONE, LEFT_OUT, "exit 3", DONE]
    words = [entry["words"] for entry in found.values()]
    assert words[1:] == ["left out: no-such-program is not installed", "the end", "its own"]
    assert found["bad"]["notes"] == ["FAILED this"]
    assert list(ledger.reports("tests", "figures")) == [{"rows": [1]}]
    assert ledger.logs.read_text().count("==== figures: ") == 4
    ledger.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.json", "logs.txt"]


def test_what_is_done_is_not_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "mark"
    append = python(f"open({str(mark)!r}, 'a').write('x'); raise SystemExit(len(open({str(mark)!r}).read()) == 1)")
    stages = [Stage("once", 20, append)]
    for runs, redo in ((1, ()), (2, ()), (2, ()), (3, ("once",))):  # it fails first
        run_stages("tests", stages, Ledger(tmp_path / "out"), redo)
        assert mark.read_text() == "x" * runs
    assert capsys.readouterr().out.count("once: done before") == 1


def test_a_stage_is_cut_at_its_limit_and_says_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path)
    monkeypatch.setattr(gpu_stages, "GRACE", 5)
    run_stages("figures", [Stage("slow", 1, python(CUT)), Stage("none left", 0, python("1"))], ledger, ())
    slow, none_left = ledger.calls["figures"].values()
    assert (slow["state"], slow["words"]) == ("cut after 1 s", "saved what there was")
    assert none_left["state"] == "no time"


def test_a_call_that_was_killed_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    first = Ledger(tmp_path)
    first.close("figures", "smoke", DONE, 1.0)
    log, saved = first.files("figures", "engine")
    log.write_text("half way\n")
    saved.write_text(json.dumps({"rows": []}))
    second = Ledger(tmp_path)
    assert second.state("figures", "smoke") == DONE
    assert second.state("figures", "engine") == "killed, with the call"
    assert list(second.reports("figures")) == [{"rows": []}]
    log.write_text("cut short\n")
    saved.write_text('{"rows')
    kept = list(Ledger(tmp_path).reports("figures"))
    assert kept == [{"rows": []}], "an unreadable report does not replace a good one"


# ---- compiled kernels


def kernel(cache: Path, name: str, size: int = 10) -> Path:
    folder = cache / name
    folder.mkdir(parents=True)
    files = [folder / f"kernel.{suffix}" for suffix in ("cubin", "json", "ttir", "ptx")]
    for file in files:
        file.write_bytes(bytes(size))
    listed = {file.name: str(file) for file in files}
    (folder / "__grp__kernel.json").write_text(json.dumps({"child_paths": listed}))
    return folder


def test_kernels_are_found_wherever_the_cache_lies(tmp_path: Path) -> None:
    kernel(tmp_path / "old", "A")
    assert archive.pack(tmp_path / "old", tmp_path / archive.NAME) == 0
    kernel(tmp_path / "new", "B")
    archive.unpack(tmp_path / archive.NAME, tmp_path / "new")
    listed = json.loads((tmp_path / "new" / "A" / "__grp__kernel.json").read_text())["child_paths"]
    assert listed == {name: str(tmp_path / "new" / "A" / name) for name in ("kernel.cubin", "kernel.json")}
    assert all(Path(path).exists() for path in listed.values())
    assert (tmp_path / "new" / "B").is_dir()
