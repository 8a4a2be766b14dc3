"""What cannot be measured is refused by name, before any work."""

from __future__ import annotations

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


REFUSED = [
    ("fast", "BadOption: 'fast' is no mode: the modes are throughput, latency"),
    *((f"{mode} --model no/such/folder", "ModelNotFound: ") for mode in ("throughput", "serve", "prefix", "startup")),
    ("throughput --input-len 9 3", "BadOption: --input-len is 9 3: the first must not be above"),
    ("throughput --input-len 9 4090", "would have 4218 tokens, prompt and output, but max_model_len is 4096"),
    ("latency --random-weights tiny --input-len 40960", "but max_model_len is 40960"),
    ("latency --option max_model_len=100", "but max_model_len is 100"),
    ("latency --option max_nums_seqs=3", "UnknownOption: unknown option 'max_nums_seqs'"),
    ("interference --stream-output 32", "BadOption: --stream-output is 32: it must be above 32"),
    ("scheduler --nano-vllm no/such", "BadOption: --nano-vllm no/such: there is no folder nanovllm in it"),
    ("latency --plot picture.doc", "BadOption: --plot picture.doc: the name must end in .png"),
    ("scheduler --save no/file.json", "--save no/file.json: there is no folder"),
    ("quality --tokens 100 --window 64 --texts code prose", "--tokens is 100: one window of each text takes 128"),
    ("scheduler --cpu x86-64-v3", "--cpu x86-64-v3 comes too late"),  # torch is there
]
REFUSED_BY_OPTION = [
    *((f"serve --rate {rate}", f"'{rate}' must be a number above 0") for rate in ("0", "nan", "fast")),
    ("serve --slo speed=3", "'speed=3': objectives are ttft, tpot and e2e"),
    ("serve --policy oldest", "invalid choice: 'oldest'"),
    *((f"throughput --num-seqs {count}", f"'{count}' must be a whole number above 0") for count in ("0", "1.5")),
    ("throughput --option seed", "'seed' must be NAME=VALUE"),
    ("latency --speed 3", "unrecognized arguments: --speed"),
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
