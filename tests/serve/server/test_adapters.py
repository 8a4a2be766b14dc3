"""Adapters over HTTP: loaded, listed, chosen by the model field, replaced and unloaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nanoengine.models.names import DEMO
from tests.features.lora.written import linear_layers, write_adapter
from tests.serve.server.conftest import MakeServer, demo_server
from tests.serve.server.events import text_of
from tests.serve.server.running import Answer, Server

ASKED = {"max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, layers = tmp_path_factory.mktemp("adapters"), linear_layers(DEMO)
    return [write_adapter(folder / str(seed), layers, seed, size=0.2) for seed in range(2)]


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[Server]:
    options = {"num_kv_blocks": 100, "enable_lora": True, "max_loras": 3, "lora_modules": [f"first={folders[0]}"]}
    with closing(demo_server(options, admin_key="admin", api_key=("key",))) as own:
        yield own


ADMIN, USER = ({"authorization": f"Bearer {key}"} for key in ("admin", "key"))


def complete(server: Server, model: str, path: str = "/v1/completions", **fields: object) -> Answer:
    return server.post(path, {"model": model, "prompt": "def f(", **ASKED, **fields}, USER)


def load(server: Server, name: str, path: Path | str, **fields: object) -> Answer:
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **fields}, ADMIN)


def unload(server: Server, name: str) -> Answer:
    return server.post("/v1/unload_lora_adapter", {"lora_name": name, "lora_int_id": 1}, ADMIN)


def text(answer: Answer) -> str:
    assert answer.status == 200
    return str(answer.json["choices"][0]["text"])


def test_adapters_are_models_of_their_own(server: Server, folders: list[Path]) -> None:
    assert load(server, "second", folders[1]).body == b"Success: LoRA adapter 'second' added successfully."
    models = server.get("/v1/models", USER).json["data"]
    assert [(own["id"], own["parent"]) for own in models] == [("demo", None), ("first", "demo"), ("second", "demo")]
    assert models[1]["root"] == str(folders[0])
    assert server.get("/v1/models/second", USER).json == models[2]
    answers = {name: complete(server, name) for name in ("demo", "first", "second")}
    assert [own.json["model"] for own in answers.values()] == ["demo", "first", "second"]
    assert len({text(own) for own in answers.values()}) == 3
    streamed = complete(server, "second", stream=True)
    assert text_of(streamed.events) == text(answers["second"])
    assert {event["model"] for event in streamed.events} == {"second"}
    messages = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
    said = [server.post("/v1/messages", {"model": name, **messages}, USER).json["content"] for name in answers]
    assert said[0] != said[1] != said[2] != said[0], "other interfaces choose in the same way"
    assert unload(server, "second").body == b"Success: LoRA adapter 'second' removed successfully."
    refused = complete(server, "second")
    assert (refused.status, refused.error["param"]) == (404, "model")
    assert "Valid names: demo, first." in refused.error["message"]


def test_a_name_is_replaced_only_if_that_is_wanted(server: Server, folders: list[Path]) -> None:
    before = text(complete(server, "first"))
    refused = load(server, "first", folders[1])
    assert (refused.status, "unload it" in refused.error["message"]) == (400, True)
    assert load(server, "first", folders[1], load_inplace=True).status == 200
    assert text(complete(server, "first")) != before
    assert load(server, "first", folders[0], load_inplace=True).status == 200
    assert text(complete(server, "first")) == before


def test_mistakes_are_told(server: Server, folders: list[Path], tmp_path: Path) -> None:
    for answer, status, words in (
        (load(server, "demo", folders[0]), 400, "a name of the model itself"),
        (load(server, "other", tmp_path), 404, "adapter_config.json"),
        (load(server, "a\n", folders[0]), 400, "printable"),
        (load(server, "other", folders[0], rank=4), 400, "rank"),
        (unload(server, "other"), 404, "no adapter 'other' is loaded"),
    ):
        assert (answer.status, words in answer.error["message"]) == (status, True), answer.error
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert server.post(path, {"lora_name": "first", "lora_path": "x"}, USER).status == 401


def test_a_server_without_adapters_says_so(make_server: MakeServer) -> None:
    server = make_server(admin_key="admin")
    answer = server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}, ADMIN)
    assert (answer.status, "--enable-lora" in answer.error["message"]) == (400, True)
