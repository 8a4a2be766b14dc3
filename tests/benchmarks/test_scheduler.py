"""`bench.py scheduler`: what it measures, and that it leaves no capability out."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import bench
from benchmarks.scheduler import EVERYTHING, all_parts
from benchmarks.workload import Workload
from nanoengine import LLM

WORK = ["--input-len", "20", "60", "--output-len", "20", "60", "--repeat", "1"]


def run(save: Path, *arguments: object) -> list[dict[str, Any]]:
    assert bench.main(["scheduler", *map(str, arguments), "--save", str(save)]) == 0
    rows: list[dict[str, Any]] = json.loads(save.read_text())["rows"]
    return rows


def figures(rows: list[dict[str, Any]], engine: str, **case: object) -> dict[str, Any]:
    [row] = [row for row in rows if row["engine"] == engine and case.items() <= row["case"].items()]
    return {name: figure["median"] for name, figure in row["figures"].items()}


def test_the_policy_is_measured_alone_and_with_all_capabilities(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = run(tmp_path / "saved.json", "--num-seqs", 4, 24, *WORK)
    for count, policy, engine in product((4, 24), ("prefill_first", "mixed"), ("nanoengine", EVERYTHING)):
        case = {"num_seqs": count, "policy": policy}
        plenty, quarter = (figures(rows, engine, **case, pool=pool) for pool in ("plenty", "a quarter"))
        assert plenty["us_per_token"] > 0
        assert plenty["preemptions"] == 0
        assert plenty["steps"] < quarter["steps"]
        assert count == 4 or quarter["preemptions"] > 0
    shown = capsys.readouterr()
    assert "24, mixed, 1, a quarter, nanoengine ..." in shown.err.splitlines(), "what runs now, where there are no bars"
    assert "{" not in shown.out
    assert "us_per_token" in shown.out


def test_all_capabilities_are_those_of_an_engine_with_every_option(tiny: Path) -> None:
    blocks, parts = all_parts(Workload([[1] * 20], [20]), 10, 16)
    options: dict[str, Any] = {"speculation": "ngram", "preemption_mode": "swap", "kv_host_memory": 1 << 20}
    with LLM(str(tiny), num_kv_blocks=40, max_model_len=64, use_tqdm=False, **options) as llm:
        scheduler = llm.engine.scheduler
        assert list(map(type, parts)) == list(map(type, scheduler.parts))
        assert list(map(type, blocks.stores)) == list(map(type, scheduler.blocks.stores))
