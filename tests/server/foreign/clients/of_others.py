"""What people write with instructor and litellm. They cannot be in one environment with the newest of OpenAI's package."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import instructor
import litellm
import openai
from checks import (
    ASKED,
    CALLS_ONCE,
    MESSAGES,
    NOW,
    OPTIONS,
    SAID,
    SHORT,
    URL,
    WEATHER,
    Address,
    Answer,
    Made,
    Person,
    check,
    is_weather,
)

client = openai.OpenAI(max_retries=0)
litellm.suppress_debug_info = True
CITY: list[Any] = [
    {"role": "user", "content": "A city, please."},
    {"role": "assistant", "content": '{"city": "Oslo"}'},
    {"role": "user", "content": "A city, please."},
]

# ---- instructor


def in_mode(mode: str, kind: Any, messages: list[Any], options: dict[str, Any]) -> Callable[[], None]:
    def ask() -> None:
        own = instructor.from_openai(client, mode=instructor.Mode[mode])
        found = own.chat.completions.create(messages=messages, response_model=kind, max_retries=0, **options)
        assert isinstance(found, kind)

    return ask


ONE = {**OPTIONS, "parallel_tool_calls": False}
check("instructor", "`JSON_SCHEMA`")(in_mode("JSON_SCHEMA", Person, MESSAGES, OPTIONS))
check("instructor", "`TOOLS`")(in_mode("TOOLS", Person, MESSAGES, ONE))
check("instructor", "`TOOLS_STRICT`")(in_mode("TOOLS_STRICT", Person, MESSAGES, ONE))
check("instructor", "`JSON`")(in_mode("JSON", Answer, CITY, SHORT))
BLOCK = {"structured_outputs": {"regex": '```json\\n\\{"city": "(Rome|Oslo)"\\}\\n```'}}
check("instructor", "`MD_JSON` (grammar)")(in_mode("MD_JSON", Answer, MESSAGES, {**OPTIONS, "extra_body": BLOCK}))


@check("instructor", "`TOOLS`: `create_partial`")
def partial() -> None:
    own = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    *_, last = own.chat.completions.create_partial(messages=MESSAGES, response_model=Address, max_retries=0, **ONE)
    assert Address.model_validate(last.model_dump())


@check("instructor", "`MD_JSON`: `create_iterable` (grammar)")
def iterable() -> None:
    own = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
    text = '```json\n{"tasks": [{"city": "Rome"}, {"city": "Oslo"}]}\n```'
    grammar = {"structured_outputs": {"choice": [text]}}
    found = own.chat.completions.create_iterable(
        messages=MESSAGES, response_model=Answer, max_retries=0, extra_body=grammar, **OPTIONS
    )
    assert [one.city for one in found] == ["Rome", "Oslo"]


@check("instructor", "`PARALLEL_TOOLS`")
def parallel_tools() -> None:
    own = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS)
    call = '<tool_call>{"name": "Answer", "arguments": {"city": "Rome"}}</tool_call>'
    grammar = {"structured_outputs": {"choice": [call * 2]}}
    found: Any = own.chat.completions.create(
        messages=MESSAGES, response_model=Iterable[Answer], max_retries=0, extra_body=grammar, **OPTIONS
    )
    assert [one.city for one in found] == ["Rome", "Rome"]


# ---- litellm

PLACES = ("hosted_vllm/smollm2", "openai/smollm2")


def complete(place: str, **fields: Any) -> Any:
    return litellm.completion(**{**OPTIONS, **fields, "model": place}, api_base=URL, api_key="none", num_retries=0)


@check("litellm", "`response_format` of a class, whole and streamed, by `hosted_vllm/` and `openai/`")
def litellm_class() -> None:
    for place in PLACES:
        found = complete(place, messages=MESSAGES, response_format=Person)
        Person.model_validate_json(found.choices[0].message.content)
        stream = complete(place, messages=MESSAGES, response_format=Person, stream=True)
        Person.model_validate_json("".join(own.choices[0].delta.content or "" for own in stream))


@check("litellm", '`tools` with `tool_choice="required"`, whole and streamed, by `hosted_vllm/` and `openai/`')
def litellm_required() -> None:
    fields: dict[str, Any] = {
        "messages": MESSAGES,
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    for place in PLACES:
        whole = complete(place, **fields)
        built = litellm.stream_chunk_builder([*complete(place, **fields, stream=True)])
        for found in (whole, built):
            [call] = found.choices[0].message.tool_calls
            assert is_weather(call.function.name, call.function.arguments)
            assert found.choices[0].finish_reason == "tool_calls"


@check("litellm", '`tool_choice="auto"`: call, result, answer (grammar)')
def litellm_loop() -> None:
    for place in PLACES:
        made, messages = Made(), list(ASKED)
        for _ in range(2):
            message = (
                complete(place, **SHORT, messages=messages, tools=[WEATHER, NOW], extra_body=CALLS_ONCE)
                .choices[0]
                .message
            )
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                said = made.weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
        assert (made.cities, message.content) == (["Rome"], SAID)


@check("litellm", "`embedding`, by `hosted_vllm/` and `openai/`")
def litellm_embedding() -> None:
    found = [
        litellm.embedding(model=place, input=["a stack", "a queue"], api_base=URL, api_key="none").data
        for place in PLACES
    ]
    assert found[0][1]["embedding"] == found[1][1]["embedding"] != found[0][0]["embedding"]
