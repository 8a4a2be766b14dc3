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
    assert machine.peak_memory_bytes() > 50 << 20


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
    monkeypatch.setattr(machine, "PROC_STAT", tmp_path / "nothing")  # as on a system that does not say
    assert machine.OtherLoad().cores() is None
