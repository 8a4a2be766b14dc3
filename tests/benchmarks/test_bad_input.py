"""What cannot be measured is refused by name, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

import bench
from benchmarks import random_weights, session, startup


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*arguments: object, **_: object) -> None:
        raise AssertionError(f"work began: {arguments}")

    monkeypatch.setattr(session, "LLM", work)
    monkeypatch.setattr(random_weights.subprocess, "run", work)
    monkeypatch.setattr(startup, "first_token", work)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fast"], "BadOption: 'fast' is no mode: the modes are throughput, latency"),
        (["throughput", "--model", "no/such/folder"], "ModelNotFound: "),
        (["latency", "--model", "no/such/folder"], "ModelNotFound: "),
        (["serve", "--model", "no/such/folder"], "ModelNotFound: "),
        (["interference", "--model", "no/such/folder"], "ModelNotFound: "),
        (["prefix", "--model", "no/such/folder"], "ModelNotFound: "),
        (["startup", "--model", "no/such/folder"], "ModelNotFound: "),
        (["throughput", "--input-len", "9", "3"], "BadOption: --input-len is 9 3: the first must not be above"),
        (["serve", "--output-len", "9", "3"], "BadOption: --output-len is 9 3: the first must not be above"),
        (["scheduler", "--input-len", "9", "3"], "BadOption: --input-len is 9 3: the first must not be above"),
        (
            ["throughput", "--input-len", "9", "4090"],
            "would have 4218 tokens, prompt and output, but max_model_len is 4096",
        ),
        (["latency", "--input-len", "4096"], "would have 4224 tokens, prompt and output, but max_model_len is 4096"),
        (["serve", "--input-len", "9", "4090"], "would have 4218 tokens"),
        (["interference", "--input-len", "9", "3"], "BadOption: --input-len is 9 3: the first must not be above"),
        (["interference", "--input-len", "9", "4096"], "would have 4097 tokens"),
        (["interference", "--stream-output", "4096"], "would have 4160 tokens"),
        (["interference", "--stream-output", "32"], "BadOption: --stream-output is 32: it must be above 32"),
        (["prefix", "--turns", "99"], "would have 4752 tokens"),
        (["startup", "--input-len", "4096"], "would have 4097 tokens"),
        (["latency", "--random-weights", "tiny", "--input-len", "40960"], "but max_model_len is 40960"),
        (["latency", "--option", "max_model_len=100"], "but max_model_len is 100"),
        (["latency", "--option", "max_nums_seqs=3"], "UnknownOption: unknown option 'max_nums_seqs'"),
        (["latency", "--option", "block_size=0"], "InvalidConfig: block_size is 0"),
        (["scheduler", "--nano-vllm", "no/such"], "BadOption: --nano-vllm no/such: there is no folder nanovllm in it"),
        (["latency", "--dtype", "int3"], "InvalidConfig: dtype is 'int3'"),
        (["latency", "--plot", "picture.doc"], "BadOption: --plot picture.doc: the name must end in .png"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(arguments) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--rate", "0"], "'0' must be a number above 0"),
        (["serve", "--rate", "-1"], "'-1' must be a number above 0"),
        (["serve", "--rate", "nan"], "'nan' must be a number above 0"),
        (["serve", "--rate", "inf"], "'inf' must be a number above 0"),
        (["serve", "--rate", "fast"], "'fast' must be a number above 0"),
        (["serve", "--slo", "speed=3"], "'speed=3': objectives are ttft, tpot and e2e"),
        (["serve", "--slo", "ttft=0"], "'0' must be a number above 0"),
        (["serve", "--policy", "oldest_first"], "invalid choice: 'oldest_first'"),
        (["interference", "--policy", "oldest_first"], "invalid choice: 'oldest_first'"),
        (["interference", "--chunk", "0"], "'0' must be a whole number above 0"),
        (["scheduler", "--policy", "oldest_first"], "invalid choice: 'oldest_first'"),
        (["scheduler", "--depth", "0"], "'0' must be a whole number above 0"),
        (["throughput", "--num-seqs", "0"], "'0' must be a whole number above 0"),
        (["throughput", "--num-seqs", "1.5"], "'1.5' must be a whole number above 0"),
        (["throughput", "--repeat", "0"], "'0' must be a whole number above 0"),
        (["throughput", "--preset", "mine"], "invalid choice: 'mine'"),
        (["throughput", "--random-weights", "gpt5"], "invalid choice: 'gpt5'"),
        (["throughput", "--random-weights", "tiny", "--model", "folder"], "not allowed with argument"),
        (["throughput", "--option", "seed"], "'seed' must be NAME=VALUE"),
        (["throughput", "--vs", "everyone"], "invalid choice: 'everyone'"),
        (["latency", "--speed", "3"], "unrecognized arguments: --speed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_is_refused_by_its_option(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        bench.main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.plots.find_spec", lambda _: None)
    assert bench.main(["scheduler", "--plot", "picture.png"]) == 2
    assert "pip install 'nanoengine[bench]'" in capsys.readouterr().err


def test_a_plot_or_file_into_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for option in ("--plot", "--save"):
        assert bench.main(["scheduler", option, str(tmp_path / "no" / "file.png")]) == 2
        assert f"{option} {tmp_path / 'no' / 'file.png'}: there is no folder" in capsys.readouterr().err


def test_no_mode_shows_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 2
    assert bench.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"bench.py {mode}" in shown for mode in bench.MODES)
