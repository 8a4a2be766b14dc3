"""The `nanoengine` command, run as a user would."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nanoengine.cli import main
from nanoengine.models.tokenizer import HFTokenizer, Message


def test_demo_completes_code_and_shows_the_prefix_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--max-tokens", "8", "--dtype", "float32"]) == 0
    shown = capsys.readouterr().out
    assert "def binary_search(" in shown
    assert "from the prefix cache" in shown


def test_generate_streams_one_prompt(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", str(tiny), "--max-tokens", "5", "--seed", "1", "hello"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert first.endswith("\n")
    assert len(first) > 1
    assert main(arguments) == 0
    assert capsys.readouterr().out == first


def test_generate_takes_several_prompts_a_policy_and_penalties(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    penalties = ["--presence-penalty", "0.5", "--frequency-penalty", "0.5", "--repetition-penalty", "1.2"]
    options = ["--model", str(tiny), "--max-tokens", "3", "--scheduling-policy", "mixed", *penalties]
    assert main(["generate", *options, "-n", "2", "one", "two"]) == 0
    shown = capsys.readouterr().out
    assert [shown.count(f"--- {prompt!r}") for prompt in ("one", "two")] == [2, 2]


def test_generate_reads_standard_input(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert main(["generate", "--model", str(tiny), "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out


def test_chat_remembers_the_conversation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Iterator[str] = iter(["parse a date", "now the time", ""])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(lines))
    assert main(["chat", "--max-tokens", "6", "--seed", "3", "--dtype", "float32"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 2


def test_chat_forgets_the_conversation_when_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Iterator[str] = iter(["first", "/reset", "second", ""])
    conversations = recorded_conversations(monkeypatch)
    monkeypatch.setattr("builtins.input", lambda _prompt: next(lines))
    assert main(["chat", "--system", "Be brief", "--max-tokens", "3", "--dtype", "float32"]) == 0
    assert conversations == [["Be brief", "first"], ["Be brief", "second"]]


def test_chat_goes_on_after_a_message_that_the_model_has_no_room_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: Iterator[str] = iter(["first", "too long " * 100, "third", ""])
    conversations = recorded_conversations(monkeypatch)
    monkeypatch.setattr("builtins.input", lambda _prompt: next(lines))
    assert main(["chat", "--max-tokens", "3", "--max-model-len", "100", "--dtype", "float32"]) == 0
    assert capsys.readouterr().err.count("nanoengine: InvalidPrompt: ") == 1
    assert conversations[-1] == ["first", "third"], "what was refused is no part of the conversation"


def recorded_conversations(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the model was given to answer, its own answers left out; it grows as the chat goes on."""
    conversations: list[list[str]] = []
    encode_chat = HFTokenizer.encode_chat

    def recorded(self: HFTokenizer, messages: Sequence[Message], *rest: Any) -> list[int]:
        conversations.append([message["content"] for message in messages if message["role"] != "assistant"])
        return encode_chat(self, messages, *rest)

    monkeypatch.setattr(HFTokenizer, "encode_chat", recorded)
    return conversations


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "--model", "/no/such/folder", "hi"], "ModelNotFound"),
        (["chat", "--model", "smollm2"], "ModelNotFound"),
        (["fetch", "no-such-model"], "ModelNotFound"),
        (["generate", "--temperature", "-1", "hi"], "InvalidSamplingParams"),
        (["generate", "--dtype", "int3", "hi"], "InvalidConfig"),
        (["generate", "--scheduling-policy", "fcfs", "hi"], "InvalidConfig"),
        (["generate", "--model", "demo", "--dtype", "float32", ""], "InvalidPrompt"),
    ],
)
def test_mistakes_end_with_one_clear_line(
    arguments: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(arguments) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"nanoengine: {named}: ")


def test_fetch_says_where_the_model_is_and_what_to_do_with_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoengine.cli.fetch_model", lambda name: tmp_path / f"{name}.gguf")
    assert main(["fetch", "smollm2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / "smollm2.gguf"),
        "Talk with it: nanoengine chat --model smollm2",
    ]
