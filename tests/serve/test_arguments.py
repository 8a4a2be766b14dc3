"""What the command line takes, and how it tells mistakes."""

from __future__ import annotations

import argparse
import io
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest

from nanoengine import __version__
from nanoengine.builder import option_types, read_config
from nanoengine.core.config import EngineConfig
from nanoengine.models.fetch import models_folder
from nanoengine.serve.arguments import byte_count
from nanoengine.serve.cli import main
from nanoengine.sizes import format_bytes


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["genrate", "hi"], "did you mean 'generate'?"),
        (["generate", "--temprature", "0.5", "hi"], "unknown argument --temprature; did you mean '--temperature'?"),
        (["generate", "--temprature=0.5", "hi"], "did you mean '--temperature'?"),
        (["serve", "demo", "--max-waitin-g", "5"], "did you mean '--max-waiting'?"),
        (["generate", "--max-tokens", "many"], "--max-tokens: invalid int value: 'many'"),
        (["generate", "--kv-cache-memory", "2 apples"], "it must be a number of bytes"),
        (["serve", "demo", "--kv-cache-memory", "2 apples"], "it must be a number of bytes"),
        (["serve", "demo", "--max-body-bytes", "x"], "it must be a number of bytes"),
        (["serve"], "model, such as nanoengine serve smollm2"),
        (["serve", "demo", "--bogus"], "unknown argument --bogus\n"),
        (["serve", "--model", "demo"], "the model is typed without --model: nanoengine serve demo\n"),
        (["serve", "--model=demo"], "the model is typed without --model: nanoengine serve demo\n"),
        (["run", "-m", "demo"], "the model is typed without -m: nanoengine run demo\n"),
        (["generate", "-m", "demo", "hi"], "unknown argument -m\n"),
        (["models", "x"], "unknown argument x"),
        (["list", "x"], "unknown argument x"),
        (["run"], "required: model, such as nanoengine run smollm2"),
        (["generate", "--num-thread", "2", "hi"], "did you mean '--num-threads'?"),
        (["pull"], "required: name"),
        (["x" * 10**6], "invalid choice"),
        (["generate", "--" + "x" * 10**6], "unknown argument --xxx"),
    ],
)
def test_wrong_arguments_are_told_in_two_lines(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    what, how = capsys.readouterr().err.splitlines(keepends=True)
    assert what.startswith("nanoengine: ")
    assert told in what
    assert how.startswith("see nanoengine")
    assert how.endswith("--help\n")
    assert len(what) < 1000


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "--model", "/no/such/folder", "hi"], "ModelNotFound"),
        (["chat", "smollm2"], "ModelNotFound: smollm2 is not here yet"),
        (["chat"], "ModelNotFound: a chat needs a model: `nanoengine run smollm2`"),
        (["fetch", "no-such-model"], "ModelNotFound"),
        (["generate", "--temperature", "-1", "hi"], "InvalidSamplingParams"),
        (["generate", "--dtype", "int3", "hi"], "InvalidConfig"),
        (["chat", "demo", "--chat-template", "/no/such"], "InvalidConfig: chat_template is '/no/such'"),
        (["generate", "hi", "--plugins", "no_such"], "InvalidConfig: plugins names 'no_such'"),
        (["serve", "demo", "--plugins", "no_such"], "InvalidConfig: plugins names 'no_such'"),
        (["generate", "--scheduling-policy", "fcfs", "hi"], "InvalidConfig"),
        (["generate", "--model", "demo", "--dtype", "float32", ""], "InvalidPrompt"),
        (["generate", "--json-schema", "/no/such/file", "hi"], "InvalidSamplingParams: --json-schema /no/such/file"),
        (["generate", "--json-schema", os.devnull, "hi"], "InvalidSamplingParams: structured_outputs.json is no JSON"),
        (["generate", "--regex", "(", "hi"], "InvalidSamplingParams: structured_outputs.regex"),
        (["generate", "--choice", "", "hi"], "InvalidSamplingParams: structured_outputs.choice"),
        (["generate", "--model", "smolm2", "hi"], "did you mean 'smollm2'?"),
        (["fetch", "gema-3-270m"], "did you mean 'gemma-3-270m'?"),
        (["generate", "--model", "x" * 10**6, "hi"], "ModelNotFound: model 'xxx"),
        (["generate", "--model", "no/such.gguf", "hi"], "model 'no/such.gguf' is not there"),
        (["serve", "./such"], "model './such' is not there"),
        (["serve", "demo", "--max-body-bytes", "90GiB"], "from 1 to 1073741824"),
        (["generate", "--device", "x" * 10**6, "hi"], "InvalidConfig: device is 'xxx"),
        (["generate", "--stop", "", "hi"], "InvalidSamplingParams: stop"),
        (["generate", "hi", "--quantization", "int9"], "InvalidConfig: quantization"),
        (["run", "demo", "hi", "--num-threads", "0"], "InvalidConfig: num_threads"),
        (["show", "smolm2"], "did you mean 'smollm2'?"),
    ],
)
def test_wrong_values_are_told_in_one_line(
    arguments: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert main(arguments) == 1
    what = capsys.readouterr().err.strip().splitlines()[-1]
    assert what.startswith("nanoengine: ")
    assert told in what
    assert len(what) < 2100


@pytest.mark.parametrize("command", ["generate --model", "run", "chat"])
@pytest.mark.parametrize(("text", "what"), [("", "has no text"), (" \n", "has no text"), ("\ufeff", "has no text")])
def test_an_empty_input_is_an_error_before_a_model_is_opened(
    command: str, text: str, what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main([*command.split(), "/no/such/folder"]) == 1
    assert f"InvalidPrompt: standard input {what}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stop", "smollm2"], "Ctrl-C"),
        (["rm", "smollm2"], "rm {folder}/smollm2-135m-instruct.q4_1.gguf"),
        (["rm", "org/name"], "hf cache rm"),
        (["rm"], "{folder}"),
        (["cp", "a", "b"], "--served-model-name"),
        (["help", "run"], "nanoengine --help"),
    ],
)
def test_commands_of_ollama_say_in_one_line_what_to_type(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words.format(folder=models_folder()) in line


class Opened(Exception):
    """The options of an engine that would be built."""


@pytest.mark.parametrize("command", ["demo", "generate hi", "chat demo hi", "run demo hi"])
def test_every_command_with_a_model_takes_every_option_of_the_engine(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But `--seed`, which is that of sampling."""
    assert main([command.split()[0], "--help"]) == 0
    helped = set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))
    names = {field.name for kind in option_types() for field in fields(kind)} - {"model", "options"}
    assert {f"--{name.replace('_', '-')}" for name in names} <= helped

    def build(config: EngineConfig, *_: object) -> None:
        raise Opened(config)

    monkeypatch.setattr("nanoengine.llm.build_engine", build)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    options = "--seed 5 --num-threads 1 --no-enable-prefix-caching --quantization int8 --kv-cache-memory 1MiB --kv-host-memory 2M"
    with pytest.raises(Opened) as opened:
        main([*command.split(), *options.split()])
    values = {"num_threads": 1, "enable_prefix_caching": False, "quantization": "int8", "kv_cache_memory": 1 << 20}
    assert opened.value.args == (read_config("demo", {**values, "kv_host_memory": 2 << 20}),)


def test_without_a_command_it_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    for command in ("demo", "run smollm2", "serve smollm2"):
        assert f"  nanoengine {command} " in shown


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nanoengine {__version__}\n"


@pytest.mark.parametrize("command", ["demo", "generate", "chat", "run", "serve", "models", "show", "fetch"])
def test_help_has_defaults_only_where_there_are_some(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "default: None" not in shown
    assert "default: []" not in shown
    if command == "serve":
        assert "(default: 8000)" in shown


def test_a_size_has_units() -> None:
    assert byte_count("2GiB") == 2 << 30
    sizes = {1023: "1023 bytes", 40_960: "40 KiB", 1 << 30: "1 GiB", 3 << 29: "1.5 GiB", 10**15: "931,322.575 GiB"}
    assert {size: format_bytes(size) for size in sizes} == sizes
    with pytest.raises(argparse.ArgumentTypeError, match="it must be a number of bytes"):
        byte_count("2 apples")
