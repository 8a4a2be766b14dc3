"""`nanoengine serve --config FILE`: every option that the command line has, with its types and its words; what TLS asks for."""

from __future__ import annotations

import argparse
import json
import os
import re
import ssl
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from nanoengine.errors import InvalidConfig, NanoEngineError, UnknownOption
from nanoengine.serve.arguments import Parser
from nanoengine.serve.cli import main
from nanoengine.serve.command import add_arguments, configs
from nanoengine.serve.server.config import ServerConfig
from tests.serve.aio.toys import PATIENCE
from tests.serve.server.test_serve import Process, refusal


@pytest.fixture
def parser() -> Parser:
    made = Parser()
    add_arguments(made)
    return made


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "serve.toml"


def value_of(action: argparse.Action) -> tuple[Any, list[str]]:
    """For an option of any kind: a value as a file has it, and as the command line has it."""
    if action.nargs == 0:
        return False, []
    if action.nargs == "+":
        return ["-a", "b"], []
    value = {int: 7, float: 7, str: "7"}.get(action.type or str, "7MiB")  # type: ignore[call-overload]
    return value, [str(value)]


def test_a_file_may_have_every_option_of_the_command_line(parser: Parser, config: Path) -> None:
    """Under its name with either dash, and with the value that the command line makes of it."""
    actions = {action.dest: action for action in parser._actions if action.dest not in ("help", "config", "model")}
    lines, arguments, expected = [], ["other"], {"model": ["other"]}
    for number, (name, action) in enumerate(actions.items()):
        value, texts = value_of(action)
        lines.append(f"{name.replace('_', '-') if number % 2 else name} = {json.dumps(value)}")
        if texts:
            arguments += [action.option_strings[0], *texts]
        else:
            expected[name] = value
    config.write_text("\n".join(lines))
    expected |= vars(parser.parse_args(arguments))
    assert len(expected) > 80
    assert vars(parser.parse_args(["--config", str(config), "other"])) == expected


def test_the_command_line_comes_first(parser: Parser, config: Path) -> None:
    text = 'model = "demo"\nport = 1\nmax-n = 3\napi_key = "file"\npage = false\nlog_level = "error"'
    config.write_text(text, encoding="utf-8-sig")  # as some editors write it
    file = ["--config", str(config)]
    for line in (["--port", "2", *file, "--page", "-v"], ["--page", "-v", *file, "--port", "2"]):
        args = parser.parse_args(line)
        assert args.model == ["demo"]
        assert configs(args)[1] == ServerConfig(port=2, max_n=3, api_key=("file",), log_level="debug")
    for line in (["other", *file], [*file, "other"]):
        assert parser.parse_args(line).model == ["other"]


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("max_wating = 1", UnknownOption, "there is no option 'max_wating'; did you mean 'max_waiting'?"),
        ("[server]\nport = 1", UnknownOption, "no option 'server'"),
        ("config = 'other'", UnknownOption, "no option 'config'"),
        ("port = '80'", InvalidConfig, "port must be of the type int, not str"),
        ("port = true", InvalidConfig, "port must be of the type int, not bool"),
        ("page = 0", InvalidConfig, "page must be of the type bool, not int"),
        ("request-timeout = '1'", InvalidConfig, "request-timeout must be of the type float or int, not str"),
        ("api_key = ['a', 1]", InvalidConfig, "api_key must be of the type str, not int"),
        ("host = ['a']", InvalidConfig, "host must be of the type str, not list"),
        ("kv_host_memory = '2XB'", InvalidConfig, "argument --kv-host-memory: the size is '2XB': it must be"),
        ("port = ", InvalidConfig, "cannot be read"),
        ("\udcff", InvalidConfig, "cannot be read: 'utf-8' codec"),
    ],
)
def test_mistakes_are_named_with_file_and_key(
    parser: Parser, config: Path, text: str, kind: type[NanoEngineError], said: str
) -> None:
    config.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(kind, match=f"serve.toml.*{re.escape(said)}"):
        parser.parse_args(["--config", str(config)])


def test_without_a_model_or_a_file_nothing_starts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", "--port", "0"]) == 2
    assert "the following arguments are required: model" in capsys.readouterr().err
    assert "cannot be read: [Errno 2]" in refusal(capsys, "--config", str(tmp_path / "none"))


# ---- TLS


def test_files_that_tls_cannot_use_are_named_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoengine.serve.server.serve.open_serving", None)
    monkeypatch.chdir(certificates)
    os.mkfifo("pipe")
    own, key = ["--ssl-certfile", "certificate.pem"], ["--ssl-keyfile", "key.pem"]
    encrypted = ["--ssl-keyfile", "encrypted.pem"]
    assert "ssl_keyfile is given without ssl_certfile" in refusal(capsys, *key)
    assert "ssl_certfile is empty" in refusal(capsys, "--ssl-certfile", "")
    for options, said in (
        (["--ssl-certfile", "none"], "ssl_certfile='none': [Errno 2]"),
        (["--ssl-certfile", "pipe"], "ssl_certfile='pipe': it is no regular file"),
        (["--config", "pipe"], "config is 'pipe', which cannot be read: it is no regular file"),
        *((["--host", host], f"cannot listen at {host!r}") for host in ("é.ü", "a b", "a" * 70, "x:y", "1.2.3")),
        ([*own, "--ssl-keyfile", "none"], "ssl_keyfile='none': [Errno 2]"),
        ([*own, "--ssl-keyfile", "other.pem"], "(?i)ssl_keyfile='other.pem': .*mismatch"),
        ([*own, *encrypted], "ssl_keyfile='encrypted.pem': "),
        ([*own, *encrypted, "--ssl-keyfile-password", "wrong"], "the password of the key; .*encrypted.pem"),
    ):
        said = said.replace("[", r"\[")
        assert re.search(said, refusal(capsys, *options))


def test_a_server_of_a_file_speaks_tls_and_logs_json_alone(
    processes: list[Process], certificates: Path, config: Path
) -> None:
    """With a traceback, a client that means no TLS, and a warning of Python among what it has to log."""
    values = {"port": 0, "log-format": "json", "ssl_keyfile_password": "secret"}
    values |= {"ssl_certfile": f"{certificates}/certificate.pem", "ssl_keyfile": f"{certificates}/encrypted.pem"}
    config.write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in values.items()))
    breaks = "import warnings; from nanoengine.serve.server.apis import operations as own"
    breaks += "; own.version = lambda http, serving: warnings.warn('a warning') or 1 / 0"
    processes.append(server := Process("--config", str(config), before=breaks))
    assert server.where.startswith("https://127.0.0.1:")
    context = ssl.create_default_context(cafile=f"{certificates}/certificate.pem")
    body = {"prompt": "def f(", "max_tokens": 9, "ignore_eos": True, "stream": True}
    call = urllib.request.Request(f"{server.where}/v1/completions", json.dumps(body).encode())
    call.add_header("content-type", "application/json")
    with urllib.request.urlopen(call, timeout=PATIENCE, context=context) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")
    with pytest.raises(urllib.error.HTTPError, match="500"):
        urllib.request.urlopen(f"{server.where}/version", timeout=PATIENCE, context=context)
    server.process.terminate()
    said = [json.loads(line) for line in server.log]
    server.check_gone()
    assert all({"time", "level", "logger", "pid", "message"} <= line.keys() for line in said)
    first, second = (line for line in said if line["logger"] == "nanoengine.access")
    assert (first["path"], first["status"], first["level"]) == ("/v1/completions", 200, "info")
    assert (second["status"], second["message"][:11]) == (500, "request_id=")
    (failed,) = (line for line in said if "ZeroDivisionError" in line.get("exception", ""))
    assert failed["level"] == "error"
    assert any(line["logger"] == "py.warnings" and "a warning" in line["message"] for line in said)
