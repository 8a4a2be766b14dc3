"""Ollama's interface: what its clients send, and what they are told. The toy says what it hears."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoengine.models.fill_in_middle import FillMarks
from nanoengine.models.names import DEMO
from nanoengine.serve.server.model_card import ModelCard
from nanoengine.serve.server.ollama import OllamaWriter
from nanoengine.serve.server.replies import Usage
from tests.serve.server.conftest import MakeServer
from tests.serve.server.running import Server
from tests.serve.server.streams import lines
from tests.serve.server.weather import PLACE, ROME, TIME, WEATHER

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


def test_arguments_have_numbers_of_any_size(hermes: Server) -> None:
    call = '<tool_call>{"name": "now", "arguments": {"x": -1e999}}</tool_call>'
    [found] = both(hermes, "/api/chat", chat(call, tools=TOOLS))["message"]["tool_calls"]
    assert found["function"]["arguments"] == {"x": float("-inf")}


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
def test_who_says_nothing_loads_or_unloads_the_model(hermes: Server, path: str, said: str) -> None:
    for keep_alive, reason in (
        (0, "unload"),
        ("0s", "unload"),
        (0.0, "unload"),
        ("5m", "load"),
        (-1, "load"),
        (None, "load"),
    ):
        answer = hermes.post(path, {"model": "hermes", "keep_alive": keep_alive}).json
        assert (answer["done"], answer["done_reason"], said in answer) == (True, reason, True)
    assert hermes.post(path, {"model": "other"}).status == 404


def test_options_that_ask_for_nothing_are_taken(hermes: Server) -> None:
    neutral = {
        "typical_p": 1.0,
        "tfs_z": 1,
        "mirostat": 0,
        "xtc_probability": 0,
        "repeat_last_n": 64,
        "num_gpu": 1,
        "newer": None,
    }
    assert both(hermes, "/api/chat", chat("Hi.", options=neutral))["message"]["content"] == "Hi."


def test_penalties_of_no_token_are_none(demo: Server) -> None:
    def said(**options: Any) -> str:
        options |= {"temperature": 0, "num_predict": 24}
        return str(both(demo, "/api/generate", {"model": "demo", "prompt": "def f(", "options": options})["response"])

    assert said(repeat_penalty=1.8) != said()
    assert said(repeat_penalty=1.8, repeat_last_n=0) == said()


def test_clients_are_told_how_they_are_sampled_if_they_say_nothing(
    hermes: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hermes.serving, "defaults", {"temperature": 0.8, "repetition_penalty": 1.1, "top_k": 40})
    shown = hermes.post("/api/show", {"model": "hermes"}).json
    assert shown["parameters"].split("\n") == ["temperature 0.8", "top_k 40", "repeat_penalty 1.1"]


def test_what_clients_ask_before(hermes: Server) -> None:
    shown = hermes.post("/api/show", {"model": "hermes", "verbose": True}).json
    assert shown["capabilities"] == ["completion", "embedding", "tools", "thinking"]
    assert shown["model_info"]["parrot.context_length"] == 4096
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


def test_what_a_model_is(demo: Server) -> None:
    [listed], [running] = (demo.get(path).json["models"] for path in ("/api/tags", "/api/ps"))
    shown = demo.post("/api/show", {"model": "demo"}).json
    size = sum(file.stat().st_size for file in DEMO.glob("*.safetensors"))
    assert (listed["name"], listed["model"], listed["size"]) == ("demo", "demo", size)
    assert re.fullmatch("[0-9a-f]{64}", listed["digest"])
    details = {
        "parent_model": "",
        "format": "safetensors",
        "family": "qwen3",
        "families": ["qwen3"],
        "parameter_size": "4.74M",
    }
    assert listed["details"] == shown["details"] == {**details, "quantization_level": "BF16"}
    length = demo.serving.max_model_len
    assert listed.items() <= running.items()
    assert (running["context_length"], running["size_vram"]) == (length, 0)
    for moment in (listed["modified_at"], shown["modified_at"], running["expires_at"]):
        assert datetime.fromisoformat(moment).tzinfo is not None
    assert shown["model_info"]["general.architecture"] == "qwen3"
    assert shown["model_info"]["qwen3.context_length"] == length
    assert shown["model_info"]["general.parameter_count"] == 4_738_432


def test_what_a_gguf_file_is(tmp_path: Path) -> None:
    parts = [tmp_path / f"a-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in (*parts, tmp_path / "b.gguf"):
        part.write_bytes(b"GGUF" + bytes(6))
    config = SimpleNamespace(num_layers=28, hidden_size=3584)
    metadata = {"general.architecture": "qwen2", "general.file_type": 15}
    own: Any = {"model_config": config, "num_parameters": 7_615_616_512, "metadata": metadata, "quantization": None}
    models: Any = SimpleNamespace(checkpoint=SimpleNamespace(place=str(parts[0])), **own)
    card = ModelCard.of(models)
    assert (card.size, card.details["format"], card.details["family"]) == (20, "gguf", "qwen2")
    assert (card.details["parameter_size"], card.details["quantization_level"]) == ("7.6B", "Q4_K_M")
    parts[1].write_bytes(b"GGUF" + bytes(7))
    assert ModelCard.of(models).digest != card.digest


def test_a_model_that_fills_holes_says_so(hermes: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(hermes.serving.prompts), "fill_marks", FillMarks("<a>", "<b>", "<c>", "", ()))
    assert "insert" in hermes.post("/api/show", {"model": "hermes"}).json["capabilities"]


def test_a_whole_answer_says_when_its_first_token_was_there() -> None:
    writer = OllamaWriter("parrot", is_chat=False)
    writer.ttft = 0.0
    [last] = writer.end("stop", None, Usage(3, 0, 5))
    assert last["prompt_eval_duration"] == 0
    assert last["eval_duration"] == last["total_duration"]
