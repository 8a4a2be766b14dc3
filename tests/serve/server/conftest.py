"""Servers for the tests of this folder."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from nanoengine.builder import build_engine, read_config
from tests.serve.aio.toys import PATIENCE
from tests.serve.server.parrot import build, save_tokenizer
from tests.serve.server.running import Server

MakeServer = Callable[..., Server]


class Held:
    """A method that waits, whatever thread calls it, until a test lets it go on. `asked` has the first arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str):
        self.asked: list[Any] = []
        self._is_called, self._may_go_on, method = Event(), Event(), getattr(owner, name)

        def slowly(argument: Any, *args: Any, **options: Any) -> Any:
            self.asked.append(argument)
            self._is_called.set()
            self._may_go_on.wait(PATIENCE)
            return method(argument, *args, **options)

        monkeypatch.setattr(owner, name, slowly)

    def wait(self) -> None:
        """Until it is called."""
        assert self._is_called.wait(PATIENCE)

    def let_go(self) -> None:
        self._may_go_on.set()


HERMES = (
    "{# <tool_call> </think> #}{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if tools %} Told.{% endif %}{% if begun %}<think>{% endif %}"
)

LIMITS: dict[str, Any] = {"max_body_bytes": 1 << 20, "max_prompts": 8, "max_n": 4, "max_stop_strings": 4}


@pytest.fixture
def processes() -> Iterator[list[Any]]:
    """Servers in processes of their own; those that run are killed at the end."""
    started: list[Any] = []
    yield started
    for process in started:
        process.kill()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("parrot"))


@pytest.fixture
def make_server(tokenizer_folder: Path) -> Iterator[MakeServer]:
    """Makes servers of a toy that repeats prompts; `engine` holds its options, the others are the server's."""
    servers: list[Server] = []

    def make_one(engine: dict[str, Any] | None = None, **config: Any) -> Server:
        servers.append(Server(build(**{"folder": tokenizer_folder, **(engine or {})}), "parrot", **config))
        return servers[-1]

    yield make_one
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def parrot(tokenizer_folder: Path) -> Iterator[Server]:
    """A server of that toy, shared by the tests that leave it as they found it."""
    with closing(Server(build(tokenizer_folder), "parrot", **LIMITS)) as server:
        yield server


@pytest.fixture(scope="session")
def hermes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a template that shows how the toy writes calls and thoughts."""
    return save_tokenizer(tmp_path_factory.mktemp("hermes"), HERMES)


@pytest.fixture(scope="session")
def hermes(hermes_folder: Path) -> Iterator[Server]:
    """A server of that toy, shared likewise."""
    with closing(Server(build(hermes_folder, max_model_len=4096), "hermes")) as server:
        yield server


def demo_server(options: dict[str, Any], **config: Any) -> Server:
    """A server of the bundled model in float32; options of the engine, and of the server."""
    of_engine = read_config("demo", {"dtype": "float32", "device": "cpu", "scheduling_policy": "mixed"} | options)
    return Server(build_engine(of_engine, use_tqdm=False), "demo", **config)


@pytest.fixture(scope="session")
def demo() -> Iterator[Server]:
    """One, shared likewise."""
    with closing(demo_server({"num_kv_blocks": 600}, **LIMITS)) as server:
        yield server


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for 127.0.0.1, its key, the same encrypted, and the key of another."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    folder = tmp_path_factory.mktemp("tls")
    for command in (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost -days 2 "
        "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out certificate.pem",
        "ec -in key.pem -aes256 -passout pass:secret -out encrypted.pem",
        "ecparam -name prime256v1 -genkey -noout -out other.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return folder
