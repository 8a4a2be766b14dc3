from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import machine


def test_facts() -> None:
    facts = machine.machine_facts()
    assert facts["cores"] >= 1
    assert facts["cpu"]
    assert {"nanoengine", "torch", "transformers", "python"} <= facts["versions"].keys()


def test_peak_memory_grows_and_does_not_shrink() -> None:
    before = machine.peak_memory_bytes()
    block = bytearray(200 << 20)
    block[:: 1 << 12] = bytes(1) * len(block[:: 1 << 12])  # touch every page
    grown = machine.peak_memory_bytes()
    del block
    inexact = 1 << 20  # the system counts pages for each CPU, and adds them up now and then
    assert grown > before - inexact
    assert machine.peak_memory_bytes() > grown - inexact


def test_the_load_of_others_is_what_is_left_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    now, ours = [100.0], [5.0]
    ticks = os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(machine, "PROC_STAT", stat)
    monkeypatch.setattr(machine, "perf_counter", lambda: now[0])
    monkeypatch.setattr(machine.os, "times", lambda: (ours[0], 0.0, 0.0, 0.0, 0.0))

    def write(busy_seconds: float) -> None:
        stat.write_text(f"cpu  {int(busy_seconds * ticks)} 0 0 12345 0 0 0 0 0 0\ncpu0 0 0\n")

    write(50.0)
    load = machine.OtherLoad()
    now[0], ours[0] = 110.0, 15.0  # ten seconds in which we used one core
    write(50.0 + 10.0 + 4.0)
    assert load.cores() == pytest.approx(0.4)
    write(50.0 + 10.0)
    assert load.cores() == pytest.approx(0.0)


def test_a_system_that_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PROC_STAT", tmp_path / "nothing")
    assert machine.OtherLoad().cores() is None
