"""`python -m benchmarks.architectures`: what an engine computes wrongly is seen, and the table has all outcomes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.architectures import report
from benchmarks.architectures.bounded import in_child
from benchmarks.architectures.checkpoints import make
from benchmarks.architectures.judge import Outcome, Text, compare, difference, generate, judge, prompts
from nanoengine import LLM

WINDOWED, NUM_TOKENS = "Olmo3ForCausalLM", 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windowed")
    make(WINDOWED, folder)
    return folder


def texts_of(folder: Path) -> list[Text]:
    with LLM(str(folder), dtype="float32", device="cpu", max_model_len=64, use_tqdm=False) as llm:
        return generate(llm, prompts((5, 40)), NUM_TOKENS)


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[Text]:
    return texts_of(folder)


def test_a_checkpoint_is_the_same_every_time(folder: Path, tmp_path: Path) -> None:
    make(WINDOWED, tmp_path)
    for path in sorted(folder.iterdir()):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_right_tokens_are_equal(folder: Path, texts: list[Text]) -> None:
    outcome = compare(folder, texts, "nanoengine")
    assert outcome.kind == "nanoengine"
    assert 0 < outcome.worst < 1e-4


@pytest.mark.parametrize("place", [0, NUM_TOKENS - 1])
def test_another_token_differs(folder: Path, texts: list[Text], place: int) -> None:
    first, second = texts
    tokens = [*second.tokens[:place], (second.tokens[place] + 1) % 4096, *second.tokens[place + 1 :]]
    outcome = compare(folder, [first, replace(second, tokens=tokens)], "nanoengine")
    assert outcome.kind == "differs"
    assert outcome.worst > 0.1
    assert 0 < outcome.noise < 1e-4


def test_another_log_probability_differs(folder: Path, texts: list[Text]) -> None:
    logprobs = [texts[0].logprobs[0] + 2e-4, *texts[0].logprobs[1:]]
    assert compare(folder, [replace(texts[0], logprobs=logprobs)], "nanoengine").kind == "differs"


def test_an_engine_without_the_window_differs(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    table = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(table | {"sliding_window": 512}))
    assert compare(folder, texts_of(tmp_path), "nanoengine").kind == "differs"


def test_what_is_no_number_differs() -> None:
    rows = torch.full((1, 3), torch.nan, dtype=torch.float64)
    assert difference([Text([1], [0], [-1.0])], [rows]) == torch.inf


def test_what_the_engine_raises_is_a_refusal_or_a_crash(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge(folder, max_model_len=10**9).kind == "refused"
    monkeypatch.setattr(LLM, "generate", lambda *_, **__: 1 / 0)
    outcome = judge(folder)
    assert (outcome.kind, outcome.reason) == ("crash", "ZeroDivisionError: division by zero")


def test_a_process_that_hangs_or_ends_is_a_crash() -> None:
    assert in_child(lambda: Outcome("refused", "no"), 10) == Outcome("refused", "no")
    assert in_child(lambda: time.sleep(60) or Outcome("refused"), 0.2).reason.startswith("no result after")
    assert in_child(lambda: 1 / 0, 10).reason == "ZeroDivisionError: division by zero"
    assert "status" in in_child(lambda: exit(3), 10).reason


def test_the_table_has_a_row_for_each_kind_and_reason(tmp_path: Path) -> None:
    outcomes = {
        "AForCausalLM": Outcome("refused", "AAttention is off by 0.5"),
        "BForCausalLM:b": Outcome(
            "refused",
            "architectures is ...: no family, and transformers' modules do not run here: BAttention is off by 1.2",
        ),
        "CForCausalLM": Outcome("transformers", worst=2e-6),
        "DLMHeadModel": Outcome("transformers", worst=3e-6),
        "EForCausalLM": Outcome("noise", worst=2e-3, noise=4e-3),
    }
    path = tmp_path / "models.md"
    path.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write_docs(outcomes, path)
    text = path.read_text()
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "| refused: ... is off by N | 2 | A, B:b |  |" in text
    assert "| equal, computed by transformers' modules | 2 | C, DLMHeadModel | 3.0e-06 |" in text
    assert "E | 2.0e-03 (transformers' sdpa from its eager attention: 4.0e-03) |" in text
