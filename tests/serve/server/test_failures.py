"""A stream that is cut by a failure says why, in the words of its interface."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.server.conftest import HERMES
from tests.serve.server.parrot import POISON, build, save_tokenizer
from tests.serve.server.running import Answer, Server, until

BODIES: dict[str, Any] = {
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 400},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1000},
    "/api/chat": lambda text: {"model": "parrot", "messages": [{"role": "user", "content": text}]},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = save_tokenizer(tmp_path_factory.mktemp("failing"), HERMES)
    own = Server(build(folder, max_model_len=4096), "parrot", api_key=("key",), admin_key="root")
    yield own
    own.close()


def last_of(answer: Answer, path: str) -> tuple[str, str]:
    """How a stream ends: the kind of its last event, and the reason."""
    events = [line.removeprefix("data: ") for line in answer.body.decode().split("\n") if line[:1] in "d{" and line]
    table = json.loads(events[-2] if events[-1] == "[DONE]" else events[-1])
    if path == "/v1/responses":
        error = table["response"]["error"]
        return f"{table['type']} {error['code']}", error["message"]
    if path == "/api/chat":
        return " ".join(table), table["error"]
    kind = table["error"]["type"]
    return f"{table['type']} {kind}" if path == "/v1/messages" else kind, table["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_a_step_that_fails_is_told(server: Server, path: str) -> None:
    kinds = {"/v1/responses": "response.failed server_error", "/v1/messages": "error api_error", "/api/chat": "error"}
    key = {"authorization": "Bearer key"}
    answer = server.post(path, BODIES[path](POISON + "x") | {"stream": True}, key)
    assert answer.status == 200
    kind, reason = last_of(answer, path)
    assert (kind, "the step broke" in reason) == (kinds.get(path, "InternalServerError"), True)


@pytest.mark.parametrize("path", list(BODIES)[2:])
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_is_aborted_is_not_told_as_whole(server: Server, path: str, stream: bool) -> None:
    kinds = {"/v1/responses": "response.failed server_error", "/v1/messages": "error overloaded_error"}
    server.gate.shut()
    body = BODIES[path]("a" * 400) | {"stream": stream}
    later = server.later(server.post, path, body, {"authorization": "Bearer key"})
    assert server.post("/abort_requests", {}, {"authorization": "Bearer root"}).json["aborted"] == 1
    server.gate.open()
    answer = later.result()
    until(lambda: not len(server.serving.jobs))
    if stream:
        kind, reason = last_of(answer, path)
        assert kind == kinds.get(path, "error")
        assert "abort_requests" in reason
    else:
        assert answer.status == 503
        assert b"abort_requests" in answer.body
