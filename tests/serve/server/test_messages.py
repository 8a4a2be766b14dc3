"""/v1/messages: what Anthropic's clients send, and what they are told. The toy says what it hears."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanoengine.serve.server.errors import Problem
from nanoengine.serve.server.messages import MessagesRequest
from tests.serve.server.conftest import MakeServer
from tests.serve.server.running import Server
from tests.serve.server.streams import typed_events
from tests.serve.server.weather import PLACE, ROME, TIME

WEATHER = {"name": "weather", "input_schema": PLACE}
NOW: dict[str, Any] = {"name": "now", "description": "The time.", "type": "custom"}
NOW["input_schema"] = {"type": "object", "additionalProperties": False}
TOOLS = [WEATHER, NOW]
PATH = "/v1/messages"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    turns = [message if isinstance(message, dict) else user(message) for message in messages]
    return {"model": "hermes", "max_tokens": 2000, "messages": turns, **fields}


def gathered(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, put together as clients do."""
    message: dict[str, Any] = {}
    is_open = False
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            assert not message
            message = event["message"]
            assert message["content"] == []
        elif kind == "content_block_start":
            assert (is_open, event["index"]) == (False, len(message["content"]))
            is_open, block, text = True, event["content_block"], ""
            message["content"].append(block)
        elif kind == "content_block_delta":
            assert (is_open, event["index"]) == (True, len(message["content"]) - 1)
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                text += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif kind == "content_block_stop":
            assert is_open
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(text)
        elif kind == "message_delta":
            message |= {**event["delta"], "usage": {**message["usage"], **event["usage"]}}
        else:
            assert kind in ("ping", "message_stop")
    assert (events[-1]["type"], is_open) == ("message_stop", False)
    return message


def both(server: Server, request: dict[str, Any]) -> dict[str, Any]:
    """The message, which is the same streamed, ids and what was cached aside."""
    whole = server.post(PATH, request)
    assert whole.status == 200, whole.body
    found = whole.json
    ids = [block.pop("id") for block in found["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids)
    streamed = gathered(typed_events(server.post(PATH, request | {"stream": True})))
    for block in streamed["content"]:
        block.pop("id", None)
    assert streamed["id"].startswith("msg")
    for name in ("content", "stop_reason", "stop_sequence", "role", "type", "model"):
        assert streamed[name] == found[name]
    for usage in (found["usage"], streamed["usage"]):
        usage["all"] = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert [streamed["usage"][name] for name in ("all", "output_tokens")] == [
        found["usage"][name] for name in ("all", "output_tokens")
    ]
    return dict(found)


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def used(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "name": name, "input": arguments}


@pytest.mark.parametrize(
    ("request_body", "content", "reason"),
    [
        (body("Hello."), [text("Hello.")], "end_turn"),
        (body([text("Hel"), text("lo.")], system="Be short. "), [text("Be short. Hel\nlo.")], "end_turn"),
        (body("b", system=[text("a")]), [text("ab")], "end_turn"),
        (body("Hello.", max_tokens=3), [text("Hel")], "max_tokens"),
        (body("Hello.", stop_sequences=["lo"]), [text("Hel")], "stop_sequence"),
        (
            body(f"I look.\n{ROME}", tools=TOOLS),
            [text("I look."), used("weather", city="Rome"), text("Told.")],
            "tool_use",
        ),
        (body(ROME + TIME, tools=TOOLS), [used("weather", city="Rome"), used("now"), text("Told.")], "tool_use"),
        (
            body(ROME + TIME, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}),
            [used("weather", city="Rome"), text("Told.")],
            "tool_use",
        ),
        (body(TIME, tools=TOOLS, tool_choice={"type": "none"}), [text(f"{TIME} Told.")], "end_turn"),
        (
            body(f"<think>Rome?</think>{TIME}", tools=[NOW]),
            [{"type": "thinking", "thinking": "Rome?", "signature": ""}, used("now"), text("Told.")],
            "tool_use",
        ),
    ],
    ids=str,
)
def test_what_the_model_says(hermes: Server, request_body: dict[str, Any], content: list[Any], reason: str) -> None:
    message = both(hermes, request_body)
    assert (message["content"], message["stop_reason"]) == (content, reason)
    assert message["stop_sequence"] == ("lo" if reason == "stop_sequence" else None)


def test_an_input_has_numbers_of_any_size(hermes: Server) -> None:
    call = '<tool_call>{"name": "now", "arguments": {"x": -1e999}}</tool_call>'
    assert both(hermes, body(call, tools=[NOW]))["content"][0] == used("now", x=float("-inf"))


def test_what_can_change_nothing_is_ignored(hermes: Server) -> None:
    marks = {"cache_control": {"type": "ephemeral"}}
    plain = both(hermes, body("Hello.", system="a", tools=[NOW]))
    fields = {
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "context_management": {"edits": []},
        "mcp_servers": [],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tool_choice": {"type": "auto"},
        "container": None,
    }
    marked = body([text("Hello.") | marks], system=[text("a") | marks], tools=[NOW | marks], **fields)
    assert both(hermes, marked)["content"] == plain["content"]


def test_a_call_and_what_it_returned_come_back(hermes: Server) -> None:
    block = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("Sunny.")]}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    turns = [user("Rome?"), {"role": "assistant", "content": [thought, text("I look."), block, {**block, "id": "b"}]}]
    turns.append(user([result, {**result, "tool_use_id": "b", "content": "Warm."}, text("And?")]))
    said = both(hermes, body(*turns))["content"]
    assert said == [text("Rome?I look.Sunny.Warm.And?")]
    chat = MessagesRequest(messages=turns, max_tokens=1).chat()
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "tool", "user"]
    assert chat.messages[1]["reasoning_content"] == "Hm."
    assert [chat.messages[i]["tool_call_id"] for i in (2, 3)] == ["a", "b"]
    assert hermes.serving.prompts.of_chat(chat).text == "Rome?I look.Sunny.Warm.And?"


def test_an_answer_that_was_begun_goes_on(parrot: Server) -> None:
    begun = {"role": "assistant", "content": "I "}
    answer = parrot.post(PATH, {"max_tokens": 5, "messages": [user("Who?"), begun]})
    seen = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nI "
    counted = parrot.post(f"{PATH}/count_tokens", {"messages": [user("Who?"), begun]}).json
    assert counted == {"input_tokens": len(parrot.serving.tokenizer.encode(seen, add_special_tokens=False))}
    usage = answer.json["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]


def test_what_was_cached_is_told(hermes: Server) -> None:
    request = body("The same beginning, " * 20, max_tokens=2)
    first, second = (hermes.post(PATH, request).json["usage"] for _ in range(2))
    assert second["cache_read_input_tokens"] > 300
    assert first["input_tokens"] + first["cache_read_input_tokens"] == sum(
        second[name] for name in ("input_tokens", "cache_read_input_tokens")
    )
    *_, delta, _ = typed_events(hermes.post(PATH, request | {"stream": True}))
    assert delta["usage"] == second


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, {"weather", "now"}), ({"type": "tool", "name": "weather"}, {"weather"})],
)
def test_a_call_is_forced(demo: Server, choice: dict[str, str], names: set[str]) -> None:
    choice |= {"disable_parallel_tool_use": True}  # type: ignore[dict-item]
    request = body("Rome?", tools=TOOLS, tool_choice=choice, model="demo", temperature=0, max_tokens=200)
    message = both(demo, request)
    [block] = message["content"]
    assert (block["type"], message["stop_reason"]) == ("tool_use", "tool_use")
    assert block["name"] in names


def test_the_text_fits_a_schema(demo: Server) -> None:
    output = {"effort": "low", "format": {"type": "json_schema", "schema": WEATHER["input_schema"]}}
    for fields in ({"output_config": output}, {"output_format": output["format"]}):
        [block] = both(demo, body("Rome?", model="demo", temperature=0, max_tokens=200, **fields))["content"]
        assert json.loads(block["text"])["city"] in ("Rome", "Oslo")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("request_body", "named"),
    [
        ({"messages": [user("x")]}, "max_tokens"),
        (body(), "messages"),
        (body("x", unknown=1), "unknown"),
        (body("x", max_tokens=0), "max_tokens"),
        (body("x", temperature=-1), "temperature"),
        (body("x", stop_sequences=[""]), "stop_sequences"),
        (body("x", mcp_servers=[{}]), "mcp_servers"),
        (body("x", thinking={"type": "much"}), "thinking"),
        (body([IMAGE]), "messages[0].content[0]: blocks of type 'image'"),
        (body([{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]), "'image'"),
        (body([{"type": "tool_result"}]), "tool_use_id"),
        (body([5]), "blocks"),
        (body({"role": "tool", "content": "x"}), "role"),
        (body({"role": "assistant", "content": [{"type": "server_tool_use"}]}), "server_tool_use"),
        (body({"role": "assistant", "content": [{"type": "tool_use", "id": 5}]}), "content[0].id"),
        (body("x", tools=[{"type": "web_search_20250305", "name": "web_search"}]), "web_search_20250305"),
        (body("x", tools=[{"input_schema": {}}]), "name"),
        (body("x", tools=TOOLS, tool_choice={"type": "some"}), "tool_choice"),
        (body("x", tools=TOOLS, tool_choice={"type": "tool", "name": "sudo"}), "sudo"),
        (body("x", tool_choice={"type": "any"}), "tool_choice"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_their_shape(hermes: Server, request_body: dict[str, Any], named: str) -> None:
    for stream in (False, True):
        answer = hermes.post(PATH, request_body | {"stream": stream})
        assert answer.status == 400, answer.body
        assert set(answer.json) == {"type", "error"}
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert named in answer.json["error"]["message"]


def test_other_errors_have_their_shape_too(hermes: Server, make_server: MakeServer) -> None:
    for own, status, kind in (
        (hermes.post(PATH, body("x", model="gpt")), 404, "not_found_error"),
        (hermes.get(PATH), 405, "invalid_request_error"),
        (hermes.post(f"{PATH}/batches", {}), 404, "not_found_error"),
        (make_server(api_key=("k",)).post(PATH, body("x")), 401, "authentication_error"),
    ):
        assert (own.status, own.json["type"], own.json["error"]["type"]) == (status, "error", kind)
    kinds = {403: "permission_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error"}
    for status, kind in kinds.items():
        assert Problem(status, "x").table(PATH)["error"]["type"] == kind


def test_who_would_have_a_conversation_kept_here_is_told_to_send_all_of_it(hermes: Server) -> None:
    """Anthropic's own client then sends all messages, as its error code means."""
    assert hermes.post(PATH, body("x", thread={"type": "create"})).status == 200
    answer = hermes.post(PATH, body("x", thread={"type": "continue", "previous_message_id": "msg_1"}))
    error = answer.json["error"]
    assert (answer.status, error["type"], error["details"]) == (
        404,
        "not_found_error",
        {"error_code": "thread_not_found"},
    )
    assert "send all messages" in error["message"]


def test_a_key_comes_in_either_header(make_server: MakeServer) -> None:
    server = make_server(api_key=("secret",))
    request = body("x", model=None)
    for headers, status in (
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "Bearer secret"}, 200),
        ({"x-api-key": "secrets"}, 401),
        ({"x-api-key": ""}, 401),
        ({"authorization": "Bearer no", "x-api-key": "secret"}, 401),
    ):
        assert server.post(PATH, request, headers).status == status


def test_a_stream_that_fails_says_so(make_server: MakeServer) -> None:
    server = make_server(request_timeout=0.2)
    server.gate.shut()
    future = server.later(server.post, PATH, body("x", model=None, stream=True))
    server.wait_until_ended()
    server.gate.open()
    answer = future.result()
    start, *_, last = typed_events(answer)
    assert start["type"] == "message_start"
    assert (last["type"], last["error"]["type"]) == ("error", "timeout_error")


def test_a_silent_stream_is_kept_alive(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoengine.serve.server.answers.PING_SECONDS", 0.01)
    server = make_server(request_timeout=0.5)
    server.gate.shut()
    future = server.later(server.post, PATH, body("x", model=None, stream=True))
    server.wait_until_ended()
    server.gate.open()
    events = typed_events(future.result())
    assert [event["type"] for event in events[:4]] == ["message_start", "ping", "ping", "ping"]
