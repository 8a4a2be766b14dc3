"""What people write with Anthropic's, OpenAI's (responses) and Ollama's own packages."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import anthropic
import ollama
import openai
from checks import MODEL, QUESTION, URL, WEATHER, Answer, check, is_weather

BASE = URL.removesuffix("/v1")
SCHEMA: dict[str, Any] = WEATHER["function"]["parameters"]
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
os.environ["OLLAMA_HOST"] = BASE


def refusal(kind: type[Exception], ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The error that something asked for is refused with."""
    try:
        ask(*args, **kwargs)
    except kind as error:
        return error
    raise AssertionError("it is taken")


# ---- Anthropic's

claude = anthropic.Anthropic(base_url=BASE, api_key="none", max_retries=0)
CLAUDE: dict[str, Any] = {"model": MODEL, "max_tokens": 100}
TOOL: Any = {"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA}
FORCED: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}


@check("anthropic", "text, whole and streamed")
def text() -> None:
    whole = claude.messages.create(messages=MESSAGES, system="Be short.", extra_body={"temperature": 0}, **CLAUDE)
    with claude.messages.stream(
        messages=MESSAGES, system="Be short.", extra_body={"temperature": 0}, **CLAUDE
    ) as stream:
        parts = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].text == final.content[0].text == parts
    assert final.usage.output_tokens == whole.usage.output_tokens > 0
    counted = claude.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be short.").input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


@check("anthropic", "a call, streamed, and what it returned")
def call() -> None:
    with claude.messages.stream(messages=MESSAGES, tools=[TOOL], tool_choice=FORCED, **CLAUDE) as stream:
        message = stream.get_final_message()
    [block] = message.content
    assert message.stop_reason == "tool_use"
    assert is_weather(block.name, json.dumps(block.input))
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    turns: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    assert claude.messages.create(messages=turns, tools=[TOOL], **CLAUDE).role == "assistant"


@check("anthropic", "`messages.parse`")
def parse() -> None:
    parsed = claude.messages.parse(messages=MESSAGES, output_format=Answer, **CLAUDE)
    assert parsed.parsed_output is not None
    assert parsed.parsed_output.city in ("Rome", "Oslo")


@check("anthropic", "errors")
def errors() -> None:
    for fields, kind in (({"model": "none"}, anthropic.NotFoundError), ({"top_p": 5}, anthropic.BadRequestError)):
        error = refusal(kind, claude.messages.create, messages=MESSAGES, extra_body=fields, **CLAUDE)
        assert error.body["error"]["message"]


# ---- OpenAI's

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
RESPONSE: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 100}


@check("openai", "responses: text, whole, streamed and gone on with")
def responses() -> None:
    whole = client.responses.create(input=QUESTION, instructions="Be short.", **RESPONSE)
    with client.responses.stream(input=QUESTION, instructions="Be short.", **RESPONSE) as stream:
        parts = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert parts == whole.output_text
    again = client.responses.create(input="And in Oslo?", previous_response_id=whole.id, **RESPONSE)
    assert again.usage.input_tokens > whole.usage.input_tokens
    assert client.responses.retrieve(again.id).output_text == again.output_text


@check("openai", "responses: `parse`, a call and what it returned")
def response_call() -> None:
    assert client.responses.parse(input=QUESTION, text_format=Answer, **RESPONSE).output_parsed
    tool: Any = {"type": "function", "strict": True, **WEATHER["function"]}
    first = client.responses.create(
        input=QUESTION, tools=[tool], tool_choice="required", parallel_tool_calls=False, **RESPONSE
    )
    [own] = first.output
    assert is_weather(own.name, own.arguments)
    result: Any = {"type": "function_call_output", "call_id": own.call_id, "output": "sunny"}
    items: Any = [{"role": "user", "content": QUESTION}, *first.output, result]
    assert client.responses.create(input=items, store=False, **RESPONSE).status in ("completed", "incomplete")


# ---- Ollama's

own = ollama.Client(host=BASE)
OPTIONS = {"num_predict": 100, "temperature": 0}


@check("ollama", "chat, generate, whole and streamed; format")
def ollamas() -> None:
    whole = own.chat(MODEL, MESSAGES, options=OPTIONS)
    parts = [part.message.content or "" for part in own.chat(MODEL, MESSAGES, options=OPTIONS, stream=True)]
    assert "".join(parts) == whole.message.content
    assert own.generate(MODEL, QUESTION, options=OPTIONS).response == whole.message.content
    found = own.chat(MODEL, MESSAGES, options=OPTIONS, format=Answer.model_json_schema(), keep_alive="5m")
    assert Answer.model_validate_json(found.message.content or "").city in ("Rome", "Oslo")


@check("ollama", "list, show, ps, a call in the history, errors")
def others() -> None:
    assert [one.model for one in own.list().models] == [one.model for one in own.ps().models] == [MODEL]
    assert "completion" in (own.show(MODEL).capabilities or ())
    made = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    turns: list[Any] = [*MESSAGES, {"role": "assistant", "tool_calls": [made]}, {"role": "tool", "content": "sunny"}]
    assert own.chat(MODEL, turns, tools=[WEATHER], options=OPTIONS).done
    assert refusal(ollama.ResponseError, own.chat, "none", MESSAGES).status_code == 404


@check("ollama", "embed, dimensions; embeddings")
def embed() -> None:
    one, other = own.embed(MODEL, ["a stack", "a queue"]).embeddings
    assert own.embed(MODEL, "a stack").embeddings == [one] != [other]
    assert own.embeddings(MODEL, "a stack").embedding == one
    assert len(own.embed(MODEL, "a stack", dimensions=8).embeddings[0]) == 8
