"""The command line of the server: every option of the engine and of the server, and nothing that was not given."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest

from nanoengine.builder import option_types
from nanoengine.errors import InvalidConfig
from nanoengine.serve.command import add_arguments, configs
from nanoengine.serve.front.config import FrontConfig
from nanoengine.serve.server.config import ServerConfig


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_arguments(made)
    return made


def test_options_have_the_types_of_their_fields(parser: argparse.ArgumentParser) -> None:
    """What is not given is left to the engine."""
    assert configs(parser.parse_args(["demo"])) == ({}, ServerConfig())
    line = "demo --max-model-len 512 --no-fair-shares --no-enable-prefix-caching --async-scheduling --port 0"
    line += " --api-key a b --request-timeout 2.5 --no-page --served-model-name m"
    options, server = configs(parser.parse_args(line.split()))
    assert options == {
        "max_model_len": 512,
        "fair_shares": False,
        "enable_prefix_caching": False,
        "async_scheduling": True,
    }
    assert server == ServerConfig(port=0, api_key=("a", "b"), request_timeout=2.5, page=False, served_model_name=("m",))


def test_every_option_is_there_with_help(parser: argparse.ArgumentParser) -> None:
    helps = {action.dest: action.help for action in parser._actions}
    names = {field.name for kind in (*option_types(), ServerConfig, FrontConfig) for field in fields(kind)}
    names -= {"options", "front_socket"}
    assert {"model", "kv_host_memory", "speculation", "port"} <= names
    for name in names:
        assert helps[name], name


def test_a_key_may_come_by_the_environment(parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOENGINE_API_KEY", " secret\n")  # as a file with a secret has it
    assert configs(parser.parse_args(["demo"]))[1].api_key == ("secret",)
    assert configs(parser.parse_args(["demo", "--api-key", "other"]))[1].api_key == ("other",)


def test_an_empty_key_in_the_environment_serves_nobody(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret that was not found must not open the server."""
    monkeypatch.setenv("NANOENGINE_API_KEY", "")
    with pytest.raises(InvalidConfig, match="NANOENGINE_API_KEY is empty"):
        configs(parser.parse_args(["demo"]))
    assert configs(parser.parse_args(["demo", "--api-key", "given"]))[1].api_key == ("given",)
    monkeypatch.delenv("NANOENGINE_API_KEY")
    assert configs(parser.parse_args(["demo"]))[1].api_key is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("port", value) for value in (-1, 65536, True, "80")),
        *(("max_n", value) for value in (0, 16385)),
        ("max_waiting", -1),
        ("max_waiting_tokens", 0),
        ("request_timeout", 0),
        ("max_step_seconds", 0),
        *(("shutdown_timeout", value) for value in (-1, float("nan"))),
        *(("api_key", value) for value in ((), ("",))),
        *(("api_key", value) for value in ("text", ("a\n",), (" a",), ("\udcff",), 5)),
        ("cors_origin", ("",)),
        ("host", ""),
    ],
)
def test_what_cannot_work_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=option):
        ServerConfig(**{option: value})  # type: ignore[arg-type]


def test_no_client_has_the_key_of_the_admin() -> None:
    with pytest.raises(InvalidConfig, match=r"admin_key is one of api_key") as refused:
        ServerConfig(api_key=("secret", "other"), admin_key="secret")
    assert "secret" not in str(refused.value)
    assert ServerConfig(allowed_host=("Name.Example",)).hosts == ServerConfig(allowed_host=("name.example",)).hosts


def test_a_server_without_a_key_is_open_to_other_machines() -> None:
    for host, is_open in (("0.0.0.0", True), ("::", True), ("10.0.0.1", True), ("127.0.0.2", False), ("::1", False)):
        assert ServerConfig(host=host).is_open == is_open
        assert not ServerConfig(host=host, api_key=("key",)).is_open
