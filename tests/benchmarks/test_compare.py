from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bench
from benchmarks.report import Report


def write(path: Path, **figures: tuple[float, float, float]) -> Path:
    keys = ("median", "min", "max")
    values = {name: dict(zip(keys, figure, strict=True)) | {"repetitions": 3} for name, figure in figures.items()}
    content: dict[str, Any] = {
        "mode": "latency",
        "cpu": "a chip",
        "versions": {"torch": "2.13", "python": "3.11"},
        "rows": [{"case": {"input_len": 8}, "engine": "nanoengine", "figures": values}],
    }
    path.write_text(json.dumps(content))
    return path


def test_ratios_say_how_much_better_the_second_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.json", ttft_ms=(10, 9, 11), output_tok_s=(100, 90, 110), itl_ms=(5, 4, 6), only_a=(1, 1, 1))
    b = write(
        tmp_path / "b.json", ttft_ms=(5, 4, 6), output_tok_s=(200, 190, 210), itl_ms=(5.5, 4, 7), only_b=(1, 1, 1)
    )
    assert bench.main(["compare", str(a), str(b)]) == 0
    lines = {line.split()[3]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert lines.keys() == {"ttft_ms", "output_tok_s", "itl_ms"}
    assert lines["ttft_ms"].endswith(" 2.00 x"), "half the time"
    assert lines["output_tok_s"].endswith(" 2.00 x")
    assert lines["itl_ms"].endswith("(0.91 x)"), "the ranges overlap: it may be noise"


BAD = [(None, "cannot be read as JSON"), ("{", "cannot be read as JSON"), ("[]", "was not written by --save")]
BAD += [
    ('{"mode": "latency"}', "was not written by --save"),
    ('{"mode": "serve", "rows": []}', "is of the mode latency"),
]
BAD += [('{"mode": "latency", "rows": []}', "have no case in common")]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_bad_files(content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a.json", ttft_ms=(1, 1, 1)), tmp_path / "b.json"
    if content is not None:
        b.write_text(content)
    assert bench.main(["compare", str(a), str(b)]) == 2
    assert message in capsys.readouterr().err


def test_ratios_pair_up_the_repetitions() -> None:
    report, case = Report("throughput"), {"num_seqs": 4}
    for ours, theirs in ((10.0, 5.0), (30.0, 10.0), (8.0, 8.0)):
        report.add(case, {"output_tok_s": ours, "ttft_ms": ours, "kv_waste": 0.0})
        report.add(case, {"output_tok_s": theirs, "ttft_ms": theirs, "kv_waste": 0.0}, "peer")
    report.add(case, {"output_tok_s": 99.0})  # and then Ctrl-C: this one has no peer
    peer = report.find(case, "peer")
    assert peer is not None
    ratios = report.times_as_fast(peer)
    assert ratios["output_tok_s"] == {"median": 2.0, "min": 1.0, "max": 3.0, "repetitions": 3}
    assert ratios["ttft_ms"]["median"] == 0.5, "twice the time is half as fast"
    assert "kv_waste" not in ratios, "there is no ratio to nothing"
