"""Servers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoengine.builder import build_engine, read_config
from tests.serve.server.parrot import build, save_tokenizer
from tests.serve.server.running import Server

MakeServer = Callable[..., Server]

HERMES = (
    "{# <tool_call> </think> #}{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if tools %} Told.{% endif %}{% if begun %}<think>{% endif %}"
)

LIMITS: dict[str, Any] = {"max_body_bytes": 1 << 20, "max_prompts": 8, "max_n": 4, "max_stop_strings": 4}


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("parrot"))


@pytest.fixture
def make_server(tokenizer_folder: Path) -> Iterator[MakeServer]:
    """Makes servers of a toy that repeats prompts; `engine` holds its options, the others are the server's."""
    servers: list[Server] = []

    def make_one(engine: dict[str, Any] | None = None, **config: Any) -> Server:
        servers.append(Server(build(tokenizer_folder, **(engine or {})), "parrot", **config))
        return servers[-1]

    yield make_one
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def parrot(tokenizer_folder: Path) -> Iterator[Server]:
    """A server of that toy, shared by the tests that leave it as they found it."""
    server = Server(build(tokenizer_folder), "parrot", **LIMITS)
    yield server
    server.close()


@pytest.fixture(scope="session")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of that toy, with a template that shows how it writes calls and thoughts."""
    server = Server(build(save_tokenizer(tmp_path_factory.mktemp("hermes"), HERMES), max_model_len=4096), "hermes")
    yield server
    server.close()


@pytest.fixture(scope="session")
def demo() -> Iterator[Server]:
    """A server of the bundled model in float32, shared likewise."""
    options = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 600, "scheduling_policy": "mixed"}
    server = Server(build_engine(read_config("demo", options), use_tqdm=False), "demo", **LIMITS)
    yield server
    server.close()
