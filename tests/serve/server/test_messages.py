"""/v1/messages: what Anthropic's clients send, and what they are told. The toy says what it hears."""

from __future__ import annotations

from typing import Any

from nanoengine.serve.server.apis.anthropic import MessagesRequest
from nanoengine.serve.server.errors import APIError
from tests.serve.server.interfaces import MESSAGES
from tests.serve.server.running import Server
from tests.serve.server.streams import typed_events

NOW: dict[str, Any] = {"name": "now", "description": "The time.", "type": "custom"}
NOW["input_schema"] = {"type": "object", "additionalProperties": False}
PATH = "/v1/messages"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    turns = [message if isinstance(message, dict) else user(message) for message in messages]
    return {"model": "hermes", "max_tokens": 2000, "messages": turns, **fields}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def test_what_can_change_nothing_is_ignored(hermes: Server) -> None:
    marks = {"cache_control": {"type": "ephemeral"}}
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
    assert MESSAGES.said(hermes, marked).parts == ["aHello. Told."]


def test_a_call_and_what_it_returned_come_back(hermes: Server) -> None:
    """Results may come in one turn with a text, and a thought before its calls."""
    block = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("Sunny.")]}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    turns = [user("Rome?"), {"role": "assistant", "content": [thought, text("I look."), block, {**block, "id": "b"}]}]
    turns.append(user([result, {**result, "tool_use_id": "b", "content": "Warm."}, text("And?")]))
    assert MESSAGES.said(hermes, body(*turns)).parts == ["Rome?I look.Sunny.Warm.And?"]
    failed = [user([own | {"is_error": True} for own in turns[-1]["content"][:2]])]
    assert MESSAGES.said(hermes, body(*turns[:2], *failed)).parts == ["Rome?I look.Error:\nSunny.Error:\nWarm."]
    chat = MessagesRequest(messages=turns, max_tokens=1).chat()
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "tool", "user"]
    assert chat.messages[1]["reasoning_content"] == "Hm."
    assert [chat.messages[i]["tool_call_id"] for i in (2, 3)] == ["a", "b"]


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


def test_other_errors_have_their_shape_too(hermes: Server) -> None:
    assert hermes.get(PATH).json["error"]["type"] == "invalid_request_error"
    assert hermes.post(f"{PATH}/batches", {}).json["error"]["type"] == "not_found_error"
    kinds = {401: "authentication_error", 403: "permission_error", 413: "request_too_large"}
    for status, kind in (kinds | {429: "rate_limit_error", 500: "api_error"}).items():
        table = APIError(status, "x").table(PATH)
        assert (table["type"], table["error"]["type"]) == ("error", kind)


def test_who_would_have_a_conversation_kept_here_is_told_to_send_all_of_it(hermes: Server) -> None:
    """Anthropic's own client then sends all messages, as its error code means."""
    assert hermes.post(PATH, body("x", thread={"type": "create"})).status == 200
    answer = hermes.post(PATH, body("x", thread={"type": "continue", "previous_message_id": "msg_1"}))
    error = answer.json["error"]
    assert (answer.status, error["details"]) == (404, {"error_code": "thread_not_found"})
    assert "send all messages" in error["message"]
