"""What people write with OpenAI's own package: objects and tools."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from checks import (
    ASKED,
    CALLS_ONCE,
    MESSAGES,
    NOW,
    OPTIONS,
    QUESTION,
    SAID,
    SHORT,
    WEATHER,
    Made,
    Person,
    check,
    is_weather,
    refusal,
    refuses,
    says,
    weather,
)

NAMED = {"type": "function", "function": {"name": "weather"}}
LEAF = {"type": "object", "properties": {"v": {"enum": [1, 2]}}, "required": ["v"], "additionalProperties": False}
PAIR = {
    "$defs": {"leaf": LEAF, "leaf_or_nothing": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]}},
    "type": "object",
    "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf_or_nothing"}},
    "required": ["left", "right"],
    "additionalProperties": False,
}
client = openai.OpenAI(max_retries=0)
chat = client.chat.completions


# ---- objects


@check("openai", "`.parse` of a class")
def parse() -> None:
    found = chat.parse(messages=MESSAGES, response_format=Person, **OPTIONS)
    assert isinstance(found.choices[0].message.parsed, Person)


@check("openai", "`.parse`, `n=3`")
def parse_n() -> None:
    found = chat.parse(messages=MESSAGES, response_format=Person, n=3, **OPTIONS)
    assert all(isinstance(own.message.parsed, Person) for own in found.choices)
    assert len(found.choices) == 3


@check("openai", "`.stream` of a class")
def parse_stream() -> None:
    with chat.stream(messages=MESSAGES, response_format=Person, **OPTIONS) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)
    assert {"content.delta", "content.done"} <= kinds


@check("openai", "a schema with references, `strict`")
def references() -> None:
    kind: Any = {"type": "json_schema", "json_schema": {"name": "pair", "strict": True, "schema": PAIR}}
    found = chat.create(messages=MESSAGES, response_format=kind, **OPTIONS)
    assert json.loads(found.choices[0].message.content)["left"]["v"] in (1, 2)


refuses("openai", "`.parse` that is cut off", openai.LengthFinishReasonError)(
    lambda: chat.parse(messages=MESSAGES, response_format=Person, **{**OPTIONS, "max_tokens": 3})
)


@check("openai", "`.parse` with log probabilities")
def logprobs() -> None:
    found = chat.parse(messages=MESSAGES, response_format=Person, logprobs=True, top_logprobs=2, **OPTIONS)
    choice = found.choices[0]
    assert "".join(own.token for own in choice.logprobs.content) == choice.message.content


@check("openai", "a schema that cannot be, by its keyword and its field")
def bad_schema() -> BaseException:
    kind: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "not": {}}}}
    ask = lambda: chat.create(messages=MESSAGES, response_format=kind, **OPTIONS)  # noqa: E731
    return refusal(openai.BadRequestError, ask, "not", "response_format")


@check("openai", "`AsyncOpenAI`, four at once")
def four() -> None:
    async def ask() -> Any:
        async with openai.AsyncOpenAI() as own:
            ask = own.chat.completions.parse
            return await asyncio.gather(*(ask(messages=MESSAGES, response_format=Person, **OPTIONS) for _ in range(4)))

    assert all(isinstance(own.choices[0].message.parsed, Person) for own in asyncio.run(ask()))


# ---- tools


def streamed(**fields: Any) -> Any:
    """The last message of a stream, put together by the client, and the kinds of its events."""
    with chat.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        choice = stream.get_final_completion().choices[0]
    return choice, kinds


@check("openai", '`tool_choice="required"`, whole and streamed')
def required() -> None:
    fields: dict[str, Any] = {"messages": ASKED, "tools": [WEATHER, NOW], "tool_choice": "required", **OPTIONS}
    whole = chat.create(**fields, parallel_tool_calls=False).choices[0]
    own, kinds = streamed(**fields, parallel_tool_calls=False)
    assert "tool_calls.function.arguments.done" in kinds
    for choice in (whole, own):
        [call] = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert call.function.name == "now" or is_weather(call.function.name, call.function.arguments)
    assert own.message.tool_calls[0].function.arguments == whole.message.tool_calls[0].function.arguments


@check("openai", '`tool_choice="required"`: its calls end by themselves; their results, and an answer')
def required_ends() -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    own = chat.create(
        messages=messages, tools=[WEATHER], tool_choice="required", **SHORT | {"max_tokens": 200}
    ).choices[0]
    assert own.finish_reason == "tool_calls"
    messages.append(own.message.model_dump(exclude_none=True))
    for call in own.message.tool_calls:
        assert is_weather(call.function.name, call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    says(chat.create(messages=messages, tools=[WEATHER], **SHORT).choices[0].message.content, "sunny")


@check("openai", '`tool_choice="auto"`, as the model likes: a call that fits, or text')
def auto() -> None:
    own, _ = streamed(messages=ASKED, tools=[WEATHER, NOW], **SHORT)
    for call in own.message.tool_calls or ():
        json.loads(call.function.arguments)
    if not own.message.tool_calls:
        says(own.message.content, "<a call>")


@check("openai", "a tool by its name, whole and streamed")
def named() -> None:
    fields: dict[str, Any] = {"messages": MESSAGES, "tools": [WEATHER, NOW], "tool_choice": NAMED, **OPTIONS}
    for choice in (chat.create(**fields).choices[0], streamed(**fields)[0]):
        [call] = choice.message.tool_calls
        assert is_weather(call.function.name, call.function.arguments)


@check("openai", "`parallel_tool_calls`: true, several calls, each with an id and a place of its own", "ids", "index")
def parallel() -> None:
    grammar = {"structured_outputs": {"regex": r'(<tool_call>\{"name": "now", "arguments": \{\}\}</tool_call>){3}'}}
    fields: dict[str, Any] = {"messages": MESSAGES, "tools": [NOW], "extra_body": grammar, **OPTIONS}
    for choice in (chat.create(**fields, parallel_tool_calls=True).choices[0], streamed(**fields)[0]):
        assert len({call.id for call in choice.message.tool_calls}) == 3
    [_] = chat.create(**fields, parallel_tool_calls=False).choices[0].message.tool_calls


@check("openai", "`.parse` of `pydantic_function_tool` (strict)")
def parse_tool() -> None:
    tools = [openai.pydantic_function_tool(weather)]
    found = chat.parse(messages=ASKED, tools=tools, tool_choice="required", parallel_tool_calls=False, **OPTIONS)
    [call] = found.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, weather)


@check("openai", '`tool_choice="auto"` with a strict tool: text, or a call that fits')
def strict_auto() -> None:
    tools = [openai.pydantic_function_tool(weather)]
    for seed in range(4):
        [choice] = chat.parse(messages=ASKED, tools=tools, **{**SHORT, "temperature": 1.0, "seed": seed}).choices
        assert choice.message.content or choice.message.tool_calls
        assert all(isinstance(own.function.parsed_arguments, weather) for own in choice.message.tool_calls or ())


@check("openai", '`tool_choice="none"`: text')
def none() -> None:
    [choice] = chat.create(messages=ASKED, tools=[WEATHER], tool_choice="none", **SHORT).choices
    assert (choice.message.tool_calls, bool(choice.message.content)) == (None, True)


@check("openai", "allowed tools, one of which must be called")
def allowed() -> None:
    one = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    choice: Any = one
    [found] = chat.create(messages=MESSAGES, tools=[NOW, WEATHER], tool_choice=choice, **OPTIONS).choices
    assert all(is_weather(own.function.name, own.function.arguments) for own in found.message.tool_calls)
    assert found.message.tool_calls


@check("openai", '`tool_choice="auto"`: call, result, answer (grammar), whole and streamed')
def loop() -> None:
    for ask in (lambda **fields: chat.create(**fields).choices[0], lambda **fields: streamed(**fields)[0]):
        made, messages = Made(), list(ASKED)
        while True:
            message = ask(messages=messages, tools=[WEATHER], extra_body=CALLS_ONCE, **SHORT).message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                said = made.weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
        says("".join(made.cities) or "no call", "Rome")
        assert (made.cities, message.content) == (["Rome"], SAID)
