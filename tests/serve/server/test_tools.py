"""Tools in /v1/chat/completions: told, called because a model writes a call, or because it must."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serve.server.conftest import MakeServer
from tests.serve.server.interface import Thought
from tests.serve.server.interfaces import CHAT
from tests.serve.server.parrot import save_tokenizer
from tests.serve.server.running import Server
from tests.serve.server.weather import ROME, TIME, WEATHER

NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "description": "The time."}}
TOOLS = [WEATHER, NOW]
USER = {"role": "user", "content": "How is it in Rome?"}


@pytest.fixture(scope="module")
def client(demo: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as own:
        yield own


def functions(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(own["function"]["name"], json.loads(own["function"]["arguments"])) for own in message["tool_calls"]]


# ---- what the model writes by itself


def test_white_space_around_calls_and_thoughts(hermes: Server) -> None:
    """Around a thought it is left out, and so it is where nothing but a call is said; between two texts it stays."""
    [choice] = hermes.chat(f"I look.\n{ROME}\n{TIME}\n", tools=TOOLS).json["choices"]
    assert functions(choice["message"]) == [("weather", {"city": "Rome"}), ("now", {})]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.\n\n\n Told.", "tool_calls")
    message = hermes.chat(f"<think>\nRome?\n</think>\n\n{TIME}", tools=TOOLS).json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Rome?", "Told.")
    message = hermes.chat(TIME, tools=TOOLS, max_tokens=len(TIME)).json["choices"][0]["message"]
    assert (message["content"], "reasoning_content" in message) == (None, False)


def test_thoughts_that_the_prompt_begins_or_the_client_does_not_want(hermes: Server) -> None:
    asked = {"tools": TOOLS, "chat_template_kwargs": {"begun": True}}
    assert CHAT.said(hermes, CHAT.body([("user", f"Rome?</think>{TIME}")]) | asked).parts[0] == Thought("Rome?")
    asked = {"tools": TOOLS, "include_reasoning": False}
    assert CHAT.said(hermes, CHAT.body([("user", "<think>Rome?</think>Yes.")]) | asked).parts == ["Yes.Told."]


def test_log_probabilities_and_token_ids_come_with_every_chunk(hermes: Server) -> None:
    fields = {"tools": TOOLS, "stream": True, "logprobs": True, "return_token_ids": True, "n": 2}
    events = hermes.chat(ROME, **fields).events
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == 1]
    tokens = [token for choice in choices for token in choice.get("token_ids") or []]
    assert len(tokens) == sum(len((choice["logprobs"] or {"content": []})["content"]) for choice in choices)
    assert hermes.serving.tokenizer.decode(tokens) == f"{ROME} Told."
    assert sum("name" in call["function"] for own in choices for call in own["delta"].get("tool_calls", ())) == 1


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


def test_a_call_that_repeats_another_ends_a_forced_answer(hermes: Server) -> None:
    text = ROME + TIME + ROME + "<tool_call>" * 20
    answer = hermes.chat(text, tools=TOOLS, tool_choice="required", n=2, max_tokens=2000, logprobs=True)
    for choice in answer.json["choices"]:
        assert (choice["stop_reason"], len(choice["message"]["tool_calls"])) == ("repeated call", 2)
        names = "".join(token["token"] for token in choice["logprobs"]["content"])
        assert names == (ROME + TIME + ROME).removesuffix("\n</tool_call>")


def test_no_other_than_allowed_tools_are_called(client: openai.OpenAI, hermes: Server) -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather"}}]
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}
    fields: dict[str, Any] = {"model": "demo", "messages": [USER], "tools": TOOLS, "tool_choice": choice}
    for seed in range(3):
        [found] = client.chat.completions.create(**fields, max_tokens=200, seed=seed).choices
        assert {call.function.name for call in found.message.tool_calls or ()} == {"weather"}
    choice["allowed_tools"]["mode"] = "auto"
    message = hermes.chat(TIME + ROME, tools=TOOLS, tool_choice=choice).json["choices"][0]["message"]
    assert functions(message) == [("weather", {"city": "Rome"})]
    assert TIME in message["content"]


# ---- what is refused


def test_a_template_that_leaves_tools_out_is_refused(make_server: MakeServer, tmp_path: Path) -> None:
    template = "{% for message in messages if message.role != 'system' %}{{ message.content }}{% endfor %}"
    server = make_server({"folder": save_tokenizer(tmp_path, template)})
    answer = server.chat("x", tools=TOOLS)
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert server.chat("x", tools=TOOLS, tool_choice="none").status == 200
