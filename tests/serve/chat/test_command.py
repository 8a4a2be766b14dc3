"""`nanoengine chat` and `run` without a terminal: which model, with which parameters, and what is written."""

from __future__ import annotations

import builtins
import io
import sys
from pathlib import Path
from typing import Any

import pytest

import nanoengine.llm
from nanoengine.errors import InvalidConfig
from nanoengine.serve.chat import command
from nanoengine.serve.cli import main
from tests.serve.chat import toys
from tests.serve.server.parrot import save_tokenizer


@pytest.fixture
def parrot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is one."""
    folder = save_tokenizer(tmp_path / "parrot")
    monkeypatch.setattr(nanoengine.llm, "build_engine", lambda *_: toys.build(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def given(monkeypatch: pytest.MonkeyPatch, text: str | bytes) -> None:
    """On standard input."""
    raw = text.encode() if isinstance(text, str) else text
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))


@pytest.mark.usefixtures("parrot")
@pytest.mark.parametrize("arguments", [["chat", "x"], ["chat", "--model", "x"], ["run", "x"]], ids=" ".join)
def test_all_of_standard_input_is_one_message_and_its_answer_all_of_the_output(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given(monkeypatch, "one\n/help\n\nthree\n")
    assert main([*arguments, "--system", "Be brief"]) == 0
    assert capsys.readouterr().out == "system\nBe brief\nuser\none\n/help\n\nthree\nassistant\n"


@pytest.mark.usefixtures("parrot")
@pytest.mark.parametrize("arguments", [["run", "x"], ["chat", "x"], ["chat", "--model", "x"]], ids=" ".join)
@pytest.mark.parametrize(
    ("text", "message"), [("", "two words"), ("a file\n", "a file\n\ntwo words"), (None, "two words")]
)
def test_a_message_on_the_command_line_is_answered_behind_what_is_piped_in(
    arguments: list[str],
    text: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """None: at a terminal, which is not read. Words may stand behind options."""
    given(monkeypatch, text or "")
    if text is None:
        monkeypatch.setattr("sys.stdin", Screen())
    assert main([*arguments, "--temperature", "0", "two", "words"]) == 0
    assert capsys.readouterr().out == f"user\n{message}\nassistant\n"


@pytest.mark.usefixtures("parrot")
def test_an_answer_ends_with_a_line_end_and_is_as_long_as_it_may_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given(monkeypatch, "a" * 200)
    assert main(["chat", "x", "--max-tokens", "7"]) == 0
    assert capsys.readouterr().out == "user\na\n"


@pytest.mark.usefixtures("parrot")
@pytest.mark.parametrize(("text", "said"), [(" \n", "has no text"), (b"\xff\xfe", "is no text")])
def test_without_a_text_there_is_no_answer(
    text: str | bytes, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given(monkeypatch, text)
    assert main(["chat", "x"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"InvalidPrompt: standard input {said}" in shown.err


class Screen(io.StringIO):
    """A terminal, as far as it is asked."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_says_which_package_it_lacks_before_it_loads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    without_packages(monkeypatch)
    monkeypatch.setattr("sys.stdin", Screen())
    monkeypatch.setattr("sys.stdout", Screen())
    with pytest.raises(InvalidConfig, match=r"needs (rich|prompt_toolkit): pip install \1"):
        command.run("no-such-model", {}, {}, "", "", None)


def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("terminal", "keyboard", "screen"):
        monkeypatch.delitem(sys.modules, f"nanoengine.serve.chat.{name}", raising=False)
    real = builtins.__import__

    def refused(name: str, *rest: Any, **names: Any) -> Any:
        if name.split(".")[0] in ("rich", "prompt_toolkit"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
        return real(name, *rest, **names)

    monkeypatch.setattr(builtins, "__import__", refused)


def test_run_fetches_what_can_be_fetched_and_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[str] = []
    monkeypatch.setattr(command, "fetch", asked.append)
    assert [command.fetched(name) for name in ("smollm2", "demo", "a/folder")] == ["smollm2", "demo", "a/folder"]
    assert asked == ["smollm2"]
    path = command.DOWNLOADS["smollm2"].path
    path.parent.mkdir(parents=True)
    path.touch()
    command.fetched("smollm2")
    assert asked == ["smollm2"]
    assert command.chat_model(None) == "smollm2"


@pytest.mark.parametrize(
    ("values", "advised", "expected"),
    [({}, {}, None), ({}, {"max_tokens": 9}, 9), ({"max_tokens": 5}, {"max_tokens": 9}, 5)],
)
def test_what_is_given_wins_over_advice_and_that_over_what_suits_small_models(
    values: dict[str, int], advised: dict[str, int], expected: int | None, tiny: Path
) -> None:
    with nanoengine.LLM(str(tiny), dtype="float32", device="cpu", num_kv_blocks=40, use_tqdm=False) as llm:
        llm.built.models.default_sampling = {**llm.built.models.default_sampling, **advised}
        params = command._params(llm, {**values, "top_k": 3})
    assert (params.max_tokens, params.top_k, params.temperature, params.min_p) == (expected, 3, 0.8, 0.05)
