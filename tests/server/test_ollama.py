"""Ollama's interface: what its clients send, and what they are told. The toy says what it hears."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanoengine.server.ollama import OllamaWriter
from nanoengine.server.replies import Usage
from tests.server.conftest import MakeServer
from tests.server.running import Server
from tests.server.streams import lines
from tests.server.weather import PLACE, ROME, TIME, WEATHER

TOOLS = [WEATHER, {"type": "function", "function": {"name": "now"}}]


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    turns = [own if isinstance(own, dict) else {"role": "user", "content": own} for own in messages]
    return {"model": "hermes", "messages": turns, **fields}


def both(server: Server, path: str, request: dict[str, Any]) -> dict[str, Any]:
    """The last of a stream with all that it has said, which is what comes whole."""
    whole = server.post(path, request | {"stream": False})
    assert whole.status == 200, whole.body
    *streamed, last = lines(server.post(path, request))
    said: dict[str, Any] = {}
    for line in [*streamed, last]:
        assert line["done"] is (line is last)
        for name, value in (line["message"] if "message" in line else {"response": line["response"]}).items():
            said[name] = value if name == "role" else said[name] + value if name in said else value
    found: dict[str, Any] = whole.json
    own = found["message"] if "message" in found else {"response": found["response"]}
    for message in (said, own):
        for call in message.get("tool_calls", ()):
            assert call.pop("id")
    assert said == own
    for name in ("done_reason", "prompt_eval_count", "eval_count", "model"):
        assert last[name] == found[name]
    return found


@pytest.mark.parametrize(
    ("request_body", "said", "reason"),
    [
        (chat("Hello."), {"content": "Hello."}, "stop"),
        (chat({"role": "system", "content": "a"}, "b"), {"content": "ab"}, "stop"),
        (chat("Hello.", options={"num_predict": 3}), {"content": "Hel"}, "length"),
        (chat("Hello.", options={"stop": ["lo"], "num_predict": -1, "num_ctx": 9, "tfs_z": 1.0}), {"content": "Hel"}, "stop"),
        (chat("Hello.", keep_alive="5m", think=False, options=None), {"content": "Hello."}, "stop"),
        (chat("<think>Hm.</think>Yes.", think=True), {"content": "Yes.", "thinking": "Hm."}, "stop"),
        (
            chat(ROME + TIME, tools=TOOLS),
            {
                "content": "Told.",
                "tool_calls": [
                    {"function": {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}},
                    {"function": {"index": 1, "name": "now", "arguments": {}}},
                ],
            },
            "stop",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_model_says(hermes: Server, request_body: dict[str, Any], said: dict[str, Any], reason: str) -> None:
    answer = both(hermes, "/api/chat", request_body)
    assert (answer["message"], answer["done_reason"]) == ({"role": "assistant", **said}, reason)
    assert answer["eval_count"] > 0


def test_a_prompt_is_answered(hermes: Server) -> None:
    answer = both(hermes, "/api/generate", {"model": "hermes:latest", "prompt": "b", "system": "a"})
    assert (answer["response"], answer["model"], answer["done"]) == ("ab", "hermes:latest", True)
    answer = both(hermes, "/api/generate", {"model": "hermes", "prompt": "<think>Hm.</think>Yes."} | {"stream": True})
    assert answer["response"] == "Yes."


def test_a_call_and_what_it_returned_come_back(hermes: Server) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Sunny.", "tool_name": "weather"},
    ]
    assert both(hermes, "/api/chat", chat("Rome? ", *turns))["message"]["content"] == "Rome? Sunny."


@pytest.mark.parametrize("format", ["json", PLACE])
def test_the_text_has_a_format(demo: Server, format: Any) -> None:
    request = {"model": "demo", "prompt": "A city.", "format": format, "options": {"seed": 1, "num_predict": 400}}
    found = both(demo, "/api/generate", request | {"options": {"temperature": 0, "num_predict": 600}})
    if format != "json":
        assert json.loads(found["response"])["city"] in ("Rome", "Oslo")
    assert found["response"].lstrip()[0] == "{"


@pytest.mark.parametrize(("path", "said"), [("/api/chat", "message"), ("/api/generate", "response")])
def test_who_says_nothing_loads_the_model(hermes: Server, path: str, said: str) -> None:
    answer = hermes.post(path, {"model": "hermes", "keep_alive": 0})
    assert (answer.json["done"], answer.json["done_reason"], said in answer.json) == (True, "load", True)
    assert hermes.post(path, {"model": "other"}).status == 404


def test_clients_are_told_how_they_are_sampled_if_they_say_nothing(
    hermes: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hermes.serving, "defaults", {"temperature": 0.8, "repetition_penalty": 1.1, "top_k": 40})
    shown = hermes.post("/api/show", {"model": "hermes"}).json
    assert shown["parameters"].split("\n") == ["temperature 0.8", "top_k 40", "repeat_penalty 1.1"]


def test_what_clients_ask_before(hermes: Server) -> None:
    for path in ("/api/tags", "/api/ps"):
        assert [own["model"] for own in hermes.get(path).json["models"]] == ["hermes"]
    shown = hermes.post("/api/show", {"model": "hermes", "verbose": True}).json
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["nanoengine.context_length"] == 4096
    assert shown["parameters"] == ""
    assert hermes.post("/api/show", {"name": "hermes"}).json == shown
    assert set(hermes.get("/api/version").json) == {"version"}


@pytest.mark.parametrize(
    ("path", "request_body", "status", "named"),
    [
        ("/api/chat", chat("x", model="other"), 404, "other"),
        ("/api/chat", chat("x", unknown=1), 400, "unknown"),
        ("/api/chat", chat("x", options={"unknown": 1}), 400, "unknown"),
        ("/api/chat", chat("x", options={"mirostat": 2}), 400, "mirostat"),
        ("/api/chat", chat("x", options={"repeat_penalty": -1}), 400, "repeat_penalty"),
        ("/api/chat", chat("x", format="xml"), 400, "xml"),
        ("/api/chat", chat({"role": "user", "content": "x", "images": ["x"]}), 400, "images"),
        ("/api/chat", chat({"content": "x"}), 400, "role"),
        ("/api/chat", chat({"role": "assistant", "tool_calls": [{}]}), 400, "tool_calls[0]"),
        ("/api/generate", {"model": "hermes", "prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("/api/generate", {"model": "hermes", "prompt": "x", "context": [1]}, 400, "context"),
        ("/api/show", {}, 400, "model"),
        ("/api/pull", {}, 404, "/api/pull"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_their_shape(
    hermes: Server, path: str, request_body: dict[str, Any], status: int, named: str
) -> None:
    answer = hermes.post(path, request_body)
    assert (answer.status, set(answer.json)) == (status, {"error"})
    assert named in answer.json["error"]


def test_a_stream_that_fails_says_so(make_server: MakeServer) -> None:
    server = make_server(request_timeout=0.2)
    server.gate.shut()
    future = server.later(server.post, "/api/generate", {"model": "parrot", "prompt": "x"})
    server.wait_until_ended()
    server.gate.open()
    *_, last = lines(future.result())
    assert set(last) == {"error"}


def test_a_whole_answer_says_when_its_first_token_was_there() -> None:
    writer = OllamaWriter("parrot", is_chat=False)
    writer.ttft = 0.0
    [last] = writer.end("stop", None, Usage(3, 0, 5))
    assert last["prompt_eval_duration"] == 0
    assert last["eval_duration"] == last["total_duration"]
