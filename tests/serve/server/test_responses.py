"""/v1/responses: what OpenAI's newer clients send, and what they are told. The toy says what it hears."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from nanoengine.serve.server.response_items import turns
from tests.serve.server.conftest import MakeServer
from tests.serve.server.running import Server
from tests.serve.server.streams import typed_events
from tests.serve.server.weather import PLACE, ROME, TIME

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": PLACE,
    "strict": False,
}
NOW = {"type": "function", "name": "now", "description": "The time.", "parameters": None}
TOOLS = [WEATHER, NOW]
PATH = "/v1/responses"


def message(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


CALLED = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Rome"}'}
RETURNED = {"type": "function_call_output", "call_id": "a", "output": "Sunny."}


def replayed(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response of a stream, put together of its pieces, each of which must fit the others."""
    output: list[dict[str, Any]] = []
    for number, event in enumerate(events):
        kind = event["type"].removeprefix("response.")
        assert event["sequence_number"] == number
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            output.append(event["item"])
            text = ""
        elif kind.endswith(".delta"):
            assert (event["item_id"], event["output_index"]) == (output[-1]["id"], len(output) - 1)
            text += event["delta"]
        elif kind.endswith(("_text.done", "arguments.done")):
            assert event["text" if "text" in event else "arguments"] == text
        elif kind == "content_part.done":
            assert event["part"]["text"] == text
        elif kind == "output_item.done":
            assert event["item"]["id"] == output[-1]["id"]
            output[-1] = event["item"]
        else:
            assert kind in ("created", "in_progress", "content_part.added", "completed", "incomplete")
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    response = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    assert response["output"] == output
    return dict(response)


def essence(response: dict[str, Any]) -> list[Any]:
    """What is said, without ids."""
    found: list[Any] = []
    ids = [item["id"] for item in response["output"]]
    assert len(set(ids)) == len(ids)
    for item in response["output"]:
        if item["type"] == "function_call":
            found.append((item["name"], json.loads(item["arguments"])))
        else:
            found.append((item["type"], "".join(part["text"] for part in item["content"])))
    return found


def both(server: Server, **request: Any) -> dict[str, Any]:
    whole = server.post(PATH, request)
    assert whole.status == 200, whole.body
    streamed = replayed(typed_events(server.post(PATH, request | {"stream": True})))
    found: dict[str, Any] = whole.json
    assert essence(streamed) == essence(found)
    for name in ("status", "incomplete_details", "model", "instructions", "tools"):
        assert streamed[name] == found[name]
    assert [streamed["usage"][name] for name in ("input_tokens", "output_tokens")] == [
        found["usage"][name] for name in ("input_tokens", "output_tokens")
    ]
    return found


@pytest.mark.parametrize(
    ("request_body", "said"),
    [
        ({"input": "Hello."}, [("message", "Hello.")]),
        ({"input": [message("user", "a", "b")], "instructions": "c"}, [("message", "ca\nb")]),
        ({"input": [message("developer", "a"), message("user", "b")]}, [("message", "ab")]),
        ({"input": [{"role": "user", "content": "b"}]}, [("message", "b")]),
        ({"input": f"Look.{ROME}", "tools": TOOLS}, [("message", "Look."), ("weather", {"city": "Rome"}), ("message", "Told.")]),
        ({"input": TIME + ROME, "tools": TOOLS, "parallel_tool_calls": False}, [("now", {}), ("message", "Told.")]),
        ({"input": TIME, "tools": TOOLS, "tool_choice": "none"}, [("message", f"{TIME} Told.")]),
        ({"input": "x", "tools": [{"type": "web_search", "external_web_access": False}]}, [("message", "x")]),
        ({"input": f"<think>Hm.</think>{TIME}", "tools": [NOW]}, [("reasoning", "Hm."), ("now", {}), ("message", "Told.")]),
        (
            {"input": [message("user", "a"), message("assistant", "b"), CALLED, RETURNED, message("user", "c")]},
            [("message", "abSunny.c")],
        ),
        (
            {"input": "x", "reasoning": {"effort": None, "summary": "auto"}, "prompt_cache_key": "k", "service_tier": "auto"},
            [("message", "x")],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_model_says(hermes: Server, request_body: dict[str, Any], said: list[Any]) -> None:
    response = both(hermes, **request_body)
    assert (essence(response), response["status"]) == (said, "completed")


def test_what_others_have_added_is_taken(hermes: Server, demo: Server) -> None:
    """As vLLM has it."""
    fields: dict[str, Any] = {"input": "def f(", "max_output_tokens": 12}
    greedy = essence(both(demo, **fields, temperature=0))
    assert essence(both(demo, **fields, temperature=1.5, top_k=1)) == greedy
    assert essence(both(demo, **fields, temperature=1.5, seed=3)) != greedy
    thinks = both(hermes, input="Hm.", chat_template_kwargs={"begun": True})
    assert essence(thinks) != essence(both(hermes, input="Hm."))


def test_an_answer_that_is_cut_off_is_incomplete(hermes: Server) -> None:
    response = both(hermes, input="Hello.", max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["usage"]["output_tokens"] == 3


def test_a_conversation_goes_on_with_the_items_of_an_answer(hermes: Server) -> None:
    asked = {"type": "message", "role": "user", "content": TIME}
    first = hermes.post(PATH, {"input": [asked], "tools": [NOW]}).json
    [item] = [item for item in first["output"] if item["type"] == "function_call"]
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "Noon."}
    second = hermes.post(PATH, {"input": [asked, *first["output"], output]}).json
    assert essence(second) == [("message", f"{TIME}Told.Noon.")]


def test_items_of_two_answers_have_ids_of_their_own(hermes: Server) -> None:
    """Clients know items by their ids."""
    ids = [hermes.post(PATH, {"input": "a"}).json["output"][0]["id"] for _ in range(2)]
    assert ids[0] != ids[1]


def test_thoughts_are_carried_by_clients(hermes: Server) -> None:
    request = {
        "input": f"<think>Hm.</think>{TIME}",
        "tools": [NOW],
        "store": False,
        "include": ["reasoning.encrypted_content"],
    }
    first, *_ = hermes.post(PATH, request).json["output"]
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": first["encrypted_content"]}
    for thought, known in ((sealed, "Hm."), (first, "Hm."), ({**sealed, "encrypted_content": "gAAAA~"}, None)):
        [own] = turns([thought, CALLED])
        assert own.get("reasoning_content") == known
        assert own["tool_calls"][0]["id"] == "a"


def test_tools_of_a_namespace_are_called_by_both_names(hermes: Server) -> None:
    tools = [{"type": "namespace", "name": "clock", "tools": [NOW]}]
    response = both(hermes, input=TIME.replace("now", "clock__now"), tools=tools)
    [own] = [item for item in response["output"] if item["type"] == "function_call"]
    assert (own["name"], own["namespace"]) == ("now", "clock")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_is_forced(demo: Server, choice: Any) -> None:
    fields: dict[str, Any] = {"input": "Rome?", "tools": [WEATHER], "tool_choice": choice, "temperature": 0}
    [(name, arguments)] = essence(both(demo, **fields, parallel_tool_calls=False, max_output_tokens=200))
    assert (name, arguments["city"] in ("Rome", "Oslo")) == ("weather", True)
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    fields |= {"tool_choice": allowed, "tools": TOOLS, "parallel_tool_calls": False, "max_output_tokens": 200}
    assert essence(both(demo, **fields))[0][0] == "weather"


def test_the_text_fits_a_schema(demo: Server) -> None:
    text = {"format": {"type": "json_schema", "name": "place", "strict": True, "schema": WEATHER["parameters"]}}
    [(_, said)] = essence(both(demo, input="Rome?", text=text, temperature=0, max_output_tokens=200))
    assert json.loads(said)["city"] in ("Rome", "Oslo")


def test_openais_client(hermes: Server) -> None:
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0) as client:
        tools: Any = TOOLS
        with client.responses.stream(model="hermes", input=f"<think>Hm.</think>Look.{ROME}", tools=tools) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        assert {"response.output_text.delta", "response.function_call_arguments.done", "response.completed"} <= kinds
        [call] = [item for item in final.output if item.type == "function_call"]
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
        answer = client.responses.create(model="hermes", input=[*final.output, output], store=True)
        assert answer.output_text.endswith("Sunny.")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)


IMAGE = {"type": "input_image", "image_url": "data:"}


@pytest.mark.parametrize(
    ("request_body", "param", "named"),
    [
        ({}, "input", "input"),
        ({"input": ""}, "input", "input"),
        ({"input": "x", "unknown": 1}, "unknown", "unknown"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "give input with all items"),
        ({"input": "x", "background": True}, "background", "background"),
        ({"input": "x", "truncation": "auto"}, "truncation", "truncation"),
        ({"input": "x", "conversation": "c"}, "conversation", "conversation"),
        ({"input": "x", "include": ["message.output_text.logprobs"]}, "include", "logprobs"),
        ({"input": "x", "temperature": -1}, "temperature", "temperature"),
        ({"input": "x", "top_k": -2}, "top_k", "top_k"),
        ({"input": "x", "repetition_penalty": 9}, "repetition_penalty", "repetition_penalty"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input", "input_image"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "call_id"),
        ({"input": "x", "tools": [{"type": "code_interpreter"}]}, "tools", "code_interpreter"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools", "name"),
        ({"input": "x", "tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice", "mcp"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "response_format", "schema"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(hermes: Server, request_body: dict[str, Any], param: str, named: str) -> None:
    for stream in (False, True):
        answer = hermes.post(PATH, request_body | {"stream": stream})
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
        assert named in answer.error["message"]


def test_a_stream_that_fails_says_so(make_server: MakeServer) -> None:
    server = make_server(request_timeout=0.2)
    server.gate.shut()
    future = server.later(server.post, PATH, {"input": "x", "stream": True})
    server.wait_until_ended()
    server.gate.open()
    *_, last = typed_events(future.result())
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
