"""What cannot be measured is refused by name, before any work."""

from __future__ import annotations

import pytest

import bench
from benchmarks import random_weights, session


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*arguments: object, **_: object) -> None:
        raise AssertionError(f"work began: {arguments}")

    monkeypatch.setattr(session, "LLM", work)
    monkeypatch.setattr(random_weights.subprocess, "run", work)


REFUSED = [
    ("fast", "BadOption: 'fast' is no mode: the modes are workloads, interference"),
    *((f"{mode} --model no/such/folder", "ModelNotFound: ") for mode in ("workloads", "interference", "determinism")),
    ("interference --input-len 9 3", "BadOption: --input-len is 9 3: the first must not be above"),
    ("workloads --own 1 4090 7", "would have 4097 tokens, prompt and output, but max_model_len is 4096"),
    ("workloads --random-weights tiny --own 1 40960 1", "but max_model_len is 40960"),
    ("workloads --option max_model_len=100", "but max_model_len is 100"),
    ("workloads --option max_nums_seqs=3", "UnknownOption: unknown option 'max_nums_seqs'"),
    ("interference --stream-output 32", "BadOption: --stream-output is 32: it must be above 32"),
    ("scheduler --save no/file.json", "--save no/file.json: there is no folder"),
    ("quality --tokens 100 --window 64 --texts code prose", "--tokens is 100: one window of each text takes 128"),
    ("scheduler --cpu x86-64-v3", "--cpu x86-64-v3 comes too late"),  # torch is there
]
REFUSED_BY_OPTION = [
    *((f"interference --rate {rate}", f"'{rate}' must be a number above 0") for rate in ("0", "nan", "fast")),
    ("interference --policy oldest", "invalid choice: 'oldest'"),
    ("workloads --only serve", "invalid choice: 'serve'"),
    *((f"workloads --own 1 1 {count}", f"'{count}' must be a whole number above 0") for count in ("0", "1.5")),
    ("workloads --option seed", "'seed' must be NAME=VALUE"),
    ("workloads --speed 3", "unrecognized arguments: --speed"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_is_refused(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(line.split()) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""


@pytest.mark.parametrize(("line", "message"), REFUSED_BY_OPTION)
def test_is_refused_by_its_option(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        bench.main(line.split())
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_no_mode_shows_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 2
    assert bench.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"bench.py {mode}" in shown for mode in bench.MODES)
