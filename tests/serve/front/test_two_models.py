"""The whole command with real models: processes, files of options, and answers equal to those of each model alone."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoengine.errors import FetchFailed
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.llm import LLM
from nanoengine.serve.cli import main
from nanoengine.serve.front.ps import table
from tests.serve.aio.toys import PATIENCE
from tests.serve.server.interfaces import INTERFACES
from tests.serve.server.running import Server, until

TABLES = """
device = "cpu"
kv-cache-memory = "64MiB"
[models.long]
model = "demo"
[models.short]
model = "demo"
max-model-len = 64
"""


class Command:
    """`nanoengine serve` in a process."""

    def __init__(self, folder: Path, *arguments: str):
        self.log = folder / "log"
        command = [sys.executable, "-m", "nanoengine", "serve", "--port", "0", *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log)
        until(lambda: self.address_in_log or self.process.poll() is not None)
        self.address = ("127.0.0.1", int(self.address_in_log[0]))

    @property
    def address_in_log(self) -> list[str]:
        return re.findall(r"serving .* at http://127.0.0.1:(\d+)", self.log.read_text())

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    request, get, post = Server.request, Server.get, Server.post


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    folder = tmp_path_factory.mktemp("front")
    (folder / "options.toml").write_text(TABLES)
    command = Command(folder, "--config", str(folder / "options.toml"))
    yield command
    assert command.end() == 0


def states(server: Any) -> dict[str, str]:
    return {row["id"]: row["status"]["state"] for row in server.get("/v1/models").json["data"]}


def test_cards_of_the_headers_are_those_of_the_loaded_model(server: Any) -> None:
    for name in ("long", "short"):
        server.post("/models/unload", {"model": name})
    assert states(server) == {"long": "not loaded", "short": "not loaded"}
    before = server.post("/api/show", {"model": "long"}).json
    listed = server.get("/api/tags").json["models"][0]
    server.post("/models/load", {"model": "long"})
    after = server.post("/api/show", {"model": "long"}).json
    for field in ("template", "details", "modified_at", "model_info"):
        assert before[field] == after[field], field
    assert set(before["capabilities"]) <= set(after["capabilities"])
    assert listed["details"] == after["details"]


def test_answers_are_those_of_each_model_alone(server: Any) -> None:
    body: dict[str, Any] = {"prompt": "def binary_search(", "max_tokens": 24, "temperature": 0}
    with LLM("demo", device="cpu", use_tqdm=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=24)
        [alone] = llm.generate(["def binary_search("], params, use_tqdm=False)
    for name in ("long", "short"):
        answer = server.post("/v1/completions", {"model": name, **body})
        assert (answer.status, answer.json["choices"][0]["text"]) == (200, alone.outputs[0].text)
        streamed = server.post("/v1/completions", {"model": name, **body, "stream": True})
        assert "".join(event["choices"][0]["text"] for event in streamed.events) == alone.outputs[0].text
    assert server.post("/v1/completions", {"model": "long", **body, "request_id": "mine"}).json["id"] == "cmpl-mine"
    assert states(server) == {"long": "loaded", "short": "loaded"}
    for interface in INTERFACES:
        turns = [("user", "def binary_search(")]
        assert interface.said(server, interface.body(turns, model="long", temperature=0, max_tokens=16)).parts
    lengths = {row["id"]: row["max_model_len"] for row in server.get("/v1/models").json["data"]}
    assert lengths["short"] == 64 < lengths["long"]


def _pids(server: Any) -> list[int]:
    """The processes of models, in the order of their starts."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def test_ps_shows_the_states(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{server.address[1]}"
    server.post("/models/load", {"model": "long"})
    assert "long   loaded" in table(url)
    assert main(["ps", "--url", url]) == 0
    assert "long   loaded" in capsys.readouterr().out
    with pytest.raises(FetchFailed, match="no server of models answers"):
        table("http://127.0.0.1:1")


def test_the_front_has_no_torch(server: Any) -> None:
    server.post("/models/load", {"model": "long"})
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "libtorch" in Path(f"/proc/{_pids(server)[-1]}/maps").read_text()


def test_mistakes_are_refused_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "options.toml"
    for text, arguments, message in (
        ("", ["demo", "demo"], "two models or adapters have the name 'demo'"),
        ("", ["demo", "--pin", "demo"], "pin is for several models"),
        ("", ["demo", "smollm2", "--served-model-name", "x"], "served_model_name is for one model"),
        ("[models.a]\nport = 5", [], "port is an option of the server"),
        ("[models.a]\nno-option = 5", [], "there is no option"),
        ("models = 5", [], "models must be tables"),
        ("", ["demo", "smollm2", "--pin", "dem"], "did you mean 'demo'"),
    ):
        file.write_text(text)
        assert main(["serve", "--port", "0", "--config", str(file), *arguments]) == 1
        assert message in capsys.readouterr().err
    assert main(["serve"]) == 2
