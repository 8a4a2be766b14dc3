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


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert bench.main(["scheduler", *map(str, arguments)]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return rows


def figures(rows: list[dict[str, Any]], engine: str, **case: object) -> dict[str, Any]:
    [row] = [row for row in rows if row["engine"] == engine and case.items() <= row["case"].items()]
    return {name: figure["median"] for name, figure in row["figures"].items()}


def test_the_policy_is_measured_alone_and_with_all_capabilities(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = run(capsys, "--num-seqs", 4, 24, *WORK, "--plot", tmp_path / "scheduler.png")
    for count, policy, engine in product((4, 24), ("prefill_first", "mixed"), ("nanoengine", EVERYTHING)):
        case = {"num_seqs": count, "policy": policy}
        plenty, quarter = (figures(rows, engine, **case, pool=pool) for pool in ("plenty", "a quarter"))
        assert plenty["us_per_token"] > 0
        assert plenty["preemptions"] == 0
        assert plenty["steps"] < quarter["steps"]
        assert count == 4 or quarter["preemptions"] > 0
    assert figures(rows, "nanoengine", prompt_tokens=100_000).keys() == {"find_ms", "publish_ms"}
    assert (tmp_path / "scheduler.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_done_in_vain_with_several_steps_in_flight(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num-seqs", 4, "--input-len", 20, 20, "--output-len", 30, 30, "--repeat", 1, "--policy", "mixed"]
    rows = run(capsys, *sizes, "--depth", 1, 2, 3)
    for depth in (1, 2, 3):
        assert figures(rows, "nanoengine", depth=depth, pool="plenty")["steps"] == 30, "a prefill, and 29 decodes"


def test_all_capabilities_are_those_of_an_engine_with_every_option(tiny: Path) -> None:
    blocks, parts = all_parts(Workload([[1] * 20], [20]), 10, 16)
    options: dict[str, Any] = {"speculation": "ngram", "preemption_mode": "swap", "kv_host_memory": 1 << 20}
    with LLM(str(tiny), num_kv_blocks=40, max_model_len=64, use_tqdm=False, **options) as llm:
        scheduler = llm.engine.scheduler
        assert list(map(type, parts)) == list(map(type, scheduler.parts))
        assert list(map(type, blocks.stores)) == list(map(type, scheduler.blocks.stores))


SCHEDULER = """
from nanovllm.config import Config
from nanovllm.engine.sequence import Sequence


class Scheduler:
    def __init__(self, config: Config):
        self.waiting = []

    def add(self, seq):
        self.waiting.append(seq)

    def is_finished(self):
        return not self.waiting

    def schedule(self):
        return self.waiting, False

    def postprocess(self, seqs, tokens, is_prefill):
        for seq in seqs:
            seq.left -= 1
        self.waiting = [seq for seq in seqs if seq.left]
"""
SEQUENCE = """
class Sequence:
    def __init__(self, token_ids, params):
        self.left = params.max_tokens
"""
PARAMS = """
class SamplingParams:
    def __init__(self, temperature, ignore_eos, max_tokens):
        self.max_tokens = max_tokens
"""


def test_a_checkout_of_nano_vllm_is_measured_beside_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One that has its names, and whose own first module could not be imported here."""
    folder = tmp_path / "nanovllm"
    (folder / "engine").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('no GPU')")
    (folder / "sampling_params.py").write_text(PARAMS)
    (folder / "engine" / "scheduler.py").write_text(SCHEDULER)
    (folder / "engine" / "sequence.py").write_text(SEQUENCE)
    rows = run(capsys, "--num-seqs", 2, "--output-len", 7, 7, "--repeat", 1, "--nano-vllm", tmp_path)
    assert figures(rows, "nano-vllm", policy="prefill_first", pool="plenty")["steps"] == 7
    assert not [row for row in rows if row["engine"] == "nano-vllm" and row["case"]["policy"] == "mixed"]
