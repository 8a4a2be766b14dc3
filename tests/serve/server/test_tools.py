"""Tools in /v1/chat/completions: told, called because a model writes a call, or because it must."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from nanoengine.depth import MAX_DEPTH
from tests.serve.server.parrot import build, save_tokenizer
from tests.serve.server.running import Server
from tests.serve.server.weather import ROME, TIME, WEATHER

NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "description": "The time."}}
TOOLS = [WEATHER, NOW]
USER = {"role": "user", "content": "How is it in Rome?"}


@pytest.fixture(scope="module")
def client(demo: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as own:
        yield own


def gathered(events: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The message of a stream, put together as clients do, and why it ended."""
    message: dict[str, Any] = {}
    reasons = []
    for event in events:
        for choice in event["choices"]:
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    calls = message.setdefault(name, [])
                    for call in value:
                        assert call["index"] == len(calls)
                        calls.append({key: own for key, own in call.items() if key != "index"})
                else:
                    message[name] = message.get(name, "") + value
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    [reason] = reasons
    return message, reason


def functions(message: dict[str, Any]) -> list[tuple[str, Any]]:
    assert all(call["type"] == "function" and call["id"] for call in message["tool_calls"])
    assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])
    return [(own["function"]["name"], json.loads(own["function"]["arguments"])) for own in message["tool_calls"]]


# ---- what the model writes by itself


def both(server: Server, content: str, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message and the reason, which are the same streamed."""
    whole = server.chat(content, tools=TOOLS, **fields)
    assert whole.status == 200, whole.body
    [choice] = whole.json["choices"]
    message, reason = gathered(server.chat(content, tools=TOOLS, stream=True, **fields).events)
    assert reason == choice["finish_reason"]
    own = choice["message"]
    for name in ("content", "reasoning", "reasoning_content"):
        assert (message.get(name) or None) == (own.get(name) or None)
    if "tool_calls" in own:
        assert functions(message) == functions(own)
    return own, reason


def test_a_call_that_the_model_writes_is_told_as_such(hermes: Server) -> None:
    message, reason = both(hermes, f"I look.\n{ROME}\n{TIME}\n")
    assert functions(message) == [("weather", {"city": "Rome"}), ("now", {})]
    assert (message["content"], reason) == ("I look.\n\n\n Told.", "tool_calls")
    message, _ = both(hermes, ROME + TIME, parallel_tool_calls=False)
    assert functions(message) == [("weather", {"city": "Rome"})]


@pytest.mark.parametrize("text", ["Hello.", "<tool_call>{", ROME.replace("weather", "sudo"), ROME.replace(":", "=")])
def test_what_is_no_call_is_text(hermes: Server, text: str) -> None:
    message, reason = both(hermes, text)
    assert (message["content"], reason) == (f"{text} Told.", "stop")
    assert "tool_calls" not in message


@pytest.mark.parametrize("fence", ["{}", "```json\n{}\n```"])
def test_a_call_that_is_all_of_an_answer_needs_no_mark(hermes: Server, fence: str) -> None:
    text = fence.format('{"name": "weather", "arguments": {"city": "Rome"}}')
    message, _ = both(hermes, text, max_tokens=len(text))
    assert (functions(message), message["content"]) == ([("weather", {"city": "Rome"})], None)
    message, _ = both(hermes, text)
    assert message["content"] == f"{text} Told."
    message, _ = both(hermes, text, max_tokens=len(text), tool_choice="none")
    assert message["content"] == text


def test_no_call_is_told_if_none_is_wanted(hermes: Server) -> None:
    message, reason = both(hermes, ROME, tool_choice="none")
    assert (message["content"], reason) == (f"{ROME} Told.", "stop")
    assert "tool_calls" not in message


def test_a_call_that_is_cut_off_is_not_told(hermes: Server) -> None:
    message, reason = both(hermes, ROME, max_tokens=30)
    assert (message["content"] or "", message.get("tool_calls") or [], reason) == ("", [], "length")
    message, reason = both(hermes, "Well. " + ROME, max_tokens=30)
    assert (message["content"].rstrip(), reason) == ("Well.", "length")


def test_thoughts_are_told_apart(hermes: Server) -> None:
    message, _ = both(hermes, f"<think>\nRome, {ROME}?\n</think>\n\n{TIME}")
    assert message["reasoning_content"] == message["reasoning"] == f"Rome, {ROME}?"
    assert (functions(message), message["content"]) == ([("now", {})], "Told.")
    message, _ = both(hermes, f"Rome?</think>{TIME}", chat_template_kwargs={"begun": True})
    assert (message["reasoning_content"], functions(message)) == ("Rome?", [("now", {})])
    message, _ = both(hermes, "<think>Rome?</think>Yes.", include_reasoning=False)
    assert (message["reasoning"], message["content"]) == (None, "Yes. Told.")
    assert "reasoning_content" not in message


def test_log_probabilities_and_token_ids_come_with_every_chunk(hermes: Server) -> None:
    fields = {"tools": TOOLS, "stream": True, "logprobs": True, "return_token_ids": True, "n": 2}
    events = hermes.chat(ROME, **fields).events
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == 1]
    tokens = [token for choice in choices for token in choice.get("token_ids") or []]
    assert len(tokens) == sum(len((choice["logprobs"] or {"content": []})["content"]) for choice in choices)
    assert hermes.serving.tokenizer.decode(tokens) == f"{ROME} Told."
    assert sum("tool_calls" in choice["delta"] for choice in choices) == 1


def test_history_is_as_clients_write_it(hermes: Server) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [
        {"role": "developer", "content": "Be short."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "Sunny."}]},
    ]
    for tools in (TOOLS, None):
        answer = hermes.chat(*history, tools=tools, return_prompt_text=True, max_tokens=1)
        assert answer.json["prompt_text"].startswith("Be short.How is it in Rome?Sunny.")


def test_openais_client_calls_and_answers(hermes: Server) -> None:
    """A call that the model writes, streamed to the client, made, and sent back as the client has it."""
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": f"<think>Rome?</think>{ROME}"}]
        with client.chat.completions.stream(model="hermes", messages=messages, tools=TOOLS) as stream:
            events = list(stream)
            message = stream.get_final_completion().choices[0].message
        [call] = message.tool_calls or []
        assert "tool_calls.function.arguments.done" in {event.type for event in events}
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
        sent_back = {**message.model_dump(exclude_none=True), "content": None}
        messages += [sent_back, {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}]
        whole = client.chat.completions.create(model="hermes", messages=messages, tools=TOOLS)
        assert whole.choices[0].message.content == "Sunny. Told."
        assert whole.choices[0].message.reasoning_content == "Rome?"


# ---- what it must call


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "now"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
        ({"type": "function", "function": {"name": "now"}}, {"now"}),
    ],
)
def test_a_call_is_forced(client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    fields: dict[str, Any] = {"model": "demo", "messages": [USER], "tools": TOOLS, "tool_choice": choice}
    fields |= {"max_tokens": 200, "parallel_tool_calls": False, "seed": 5}
    for temperature in (0.0, 1.0):
        whole = client.chat.completions.create(**fields, temperature=temperature).choices[0]
        [call] = whole.message.tool_calls
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        assert call.function.name in names
        arguments = json.loads(call.function.arguments)
        assert arguments in ([{"city": "Rome"}, {"city": "Oslo"}] if call.function.name == "weather" else [{}])
        with client.chat.completions.stream(**fields, temperature=temperature) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert streamed.message.tool_calls[0].function.name == call.function.name
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments


def test_the_end_of_a_call_comes_in_a_chunk_of_its_own(client: openai.OpenAI) -> None:
    """OpenAI's client tells of the end of a call if it has the call before the finish reason."""
    fields: dict[str, Any] = {"model": "demo", "messages": [USER], "tools": TOOLS, "tool_choice": "required", "n": 2}
    with client.chat.completions.stream(**fields, max_tokens=200, parallel_tool_calls=False, seed=5) as stream:
        events = list(stream)
    assert sum(event.type == "tool_calls.function.arguments.done" for event in events) == 2
    choices = [choice for event in events if event.type == "chunk" for choice in event.chunk.choices]
    ends = [choice for choice in choices if choice.finish_reason is not None]
    assert [(own.finish_reason, own.delta.model_dump(exclude_none=True)) for own in ends] == [("tool_calls", {})] * 2


def test_a_call_that_repeats_another_ends_a_forced_answer(hermes: Server) -> None:
    text = ROME + TIME + ROME + "<tool_call>" * 20
    message, reason = both(hermes, text, tool_choice="required", logprobs=True)
    assert (functions(message), reason) == ([("weather", {"city": "Rome"}), ("now", {})], "tool_calls")
    assert not message["content"]
    answer = hermes.chat(text, tools=TOOLS, tool_choice="required", n=2, max_tokens=2000, logprobs=True)
    for choice in answer.json["choices"]:
        assert (choice["stop_reason"], len(choice["message"]["tool_calls"])) == ("repeated call", 2)
        names = "".join(token["token"] for token in choice["logprobs"]["content"])
        assert names == (ROME + TIME + ROME).removesuffix("\n</tool_call>")
    message, _ = both(hermes, text)
    assert len(functions(message)) == 3, "where no call is forced, the model says when it ends"


def test_no_other_than_allowed_tools_are_called(client: openai.OpenAI, hermes: Server) -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather"}}]
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}
    fields: dict[str, Any] = {"model": "demo", "messages": [USER], "tools": TOOLS, "tool_choice": choice}
    for seed in range(3):
        [found] = client.chat.completions.create(**fields, max_tokens=200, seed=seed).choices
        assert {call.function.name for call in found.message.tool_calls or ()} == {"weather"}
    choice["allowed_tools"]["mode"] = "auto"
    message, _ = both(hermes, TIME + ROME, tool_choice=choice)
    assert functions(message) == [("weather", {"city": "Rome"})]
    assert TIME in message["content"]


# ---- what is refused


def deep_tool(depth: int) -> str:
    schema = '{"items":' * depth + "{}" + "}" * depth
    return f'{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}'


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
@pytest.mark.parametrize("depth", [MAX_DEPTH, 300, 100_000])
def test_a_tool_that_is_too_deep_is_refused(demo: Server, depth: int, choice: str) -> None:
    body = f'{{"messages":[{{"role":"user","content":"x"}}],"tool_choice":"{choice}","tools":[{deep_tool(depth)}]}}'
    answer = demo.post("/v1/chat/completions", body.encode())
    assert answer.status == 400
    assert str(MAX_DEPTH) in answer.error["message"]
    assert "tables and lists" in answer.error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "auto"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tools": [5]}, "tools", ""),
        ({"tools": [{"type": "function"}]}, "tools", "name"),
        ({"tools": [NOW, NOW]}, "tools", "name of its own"),
        (
            {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "tool_choice",
            "structured",
        ),
        (
            {"tools": [{"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}], "tool_choice": "required"},
            "tools",
            '"not"',
        ),
        (
            {"tools": [{"name": "f", "strict": True, "parameters": {"properties": {"a": {"uniqueItems": True}}}}]},
            "tools",
            "uniqueItems",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(demo: Server, fields: dict[str, Any], param: str, named: str) -> None:
    for stream in (False, True):
        answer = demo.chat("x", max_tokens=4, stream=stream, **fields)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
        assert named in answer.error["message"]


def test_a_template_that_leaves_tools_out_is_refused(tmp_path: Path) -> None:
    template = "{% for message in messages if message.role != 'system' %}{{ message.content }}{% endfor %}"
    server = Server(build(save_tokenizer(tmp_path, template)), "deaf")
    try:
        answer = server.chat("x", tools=TOOLS)
        assert (answer.status, answer.error["param"]) == (400, "tools")
        assert server.chat("x", tools=TOOLS, tool_choice="none").status == 200
    finally:
        server.close()
