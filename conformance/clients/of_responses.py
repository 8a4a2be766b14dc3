"""What people write with OpenAI's own package, by its Responses API."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from checks import (
    CAPITAL,
    MODEL,
    PIXEL,
    QUESTION,
    TOO_LONG,
    TURNS,
    WEATHER,
    Answer,
    Person,
    check,
    is_weather,
    refuses,
    says,
)

client = openai.OpenAI(max_retries=0)
responses = client.responses
OPTIONS: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 60}
TOOL: Any = {"type": "function", "strict": True, **WEATHER["function"]}
ONE: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
IMAGE: Any = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "auto"}


@check("openai", "responses: text, whole and streamed")
def texts() -> None:
    whole = responses.create(input=CAPITAL, instructions="Be short.", **OPTIONS)
    with responses.stream(input=CAPITAL, instructions="Be short.", **OPTIONS) as stream:
        events = [*stream]
    assert "".join(own.delta for own in events if own.type == "response.output_text.delta") == whole.output_text
    assert [own.sequence_number for own in events] == [*range(len(events))]
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens > 0
    says(whole.output_text, "Paris")


@check("openai", "responses: several turns as items; `metadata`, `store`; an id for each answer and each item", "ids")
def turns() -> None:
    whole = responses.create(input=[*TURNS], metadata={"a": "b"}, store=True, **OPTIONS)
    assert whole.metadata == {"a": "b"}
    others = [whole, responses.create(input=[*TURNS], **OPTIONS)]
    assert len({name for own in others for name in (own.id, *(one.id for one in own.output))}) == 4
    says(whole.output_text, "Ada")


@check("openai", "responses: a forced call, whole and streamed; its result")
def calls() -> None:
    whole = responses.create(input=QUESTION, **ONE, **OPTIONS)
    with responses.stream(input=QUESTION, **ONE, **OPTIONS) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_response()
    assert {"response.output_item.added", "response.function_call_arguments.done"} <= kinds
    for one in (whole, streamed):
        [own] = one.output
        assert own.type == "function_call"
        assert is_weather(own.name, own.arguments)
    result: Any = [{"type": "function_call_output", "call_id": whole.output[0].call_id, "output": "sunny"}]
    asked: list[Any] = [{"role": "user", "content": QUESTION}, *whole.output, *result]
    says(responses.create(input=asked, tools=[TOOL], **OPTIONS).output_text, "sunny")


@check("openai", "responses: `required` ends by itself")
def required() -> None:
    own = responses.create(
        input=QUESTION, tools=[TOOL], tool_choice="required", **{**OPTIONS, "max_output_tokens": 200}
    )
    assert own.status == "completed"
    assert all(is_weather(one.name, one.arguments) for one in own.output)


@check("openai", "responses: `parse` and `stream` of a class")
def parse() -> None:
    fields: dict[str, Any] = {"input": "A person, please.", "text_format": Person, **OPTIONS, "max_output_tokens": 200}
    assert isinstance(responses.parse(**fields).output_parsed, Person)
    with responses.stream(**fields) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Person)
    assert isinstance(responses.parse(input="A city.", text_format=Answer, **OPTIONS).output_parsed, Answer)


@check("openai", "responses: `AsyncOpenAI`, cut off by `max_output_tokens`, `reasoning`, `include`", "usage")
def cut() -> None:
    async def ask() -> Any:
        async with openai.AsyncOpenAI() as own:
            return await own.responses.create(
                input="Count from 1 to 90.",
                reasoning={"effort": "low"},
                include=["reasoning.encrypted_content"],
                **{**OPTIONS, "max_output_tokens": 16},
            )

    own = asyncio.run(ask())
    assert (own.status, own.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert own.usage.output_tokens == 16


for feature, kind, words, fields in (
    ("another model", openai.NotFoundError, "gpt-9", {"model": "gpt-9"}),
    ("too long an input", openai.BadRequestError, "context_length_exceeded", {"input": TOO_LONG}),
    ("an image", openai.BadRequestError, "image", {"input": [{"role": "user", "content": [IMAGE]}]}),
    ("`previous_response_id`", openai.BadRequestError, "all items", {"previous_response_id": "resp_1"}),
    ("`background`", openai.BadRequestError, "background", {"background": True}),
    ("`conversation`", openai.BadRequestError, "conversation", {"conversation": "conv_1"}),
    (
        "tools of another server",
        openai.BadRequestError,
        "code_interpreter",
        {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]},
    ),
    (
        "an output without its call",
        openai.BadRequestError,
        "call_9",
        {"input": [{"type": "function_call_output", "call_id": "call_9", "output": "x"}]},
    ),
    ("an unknown role", openai.BadRequestError, "role", {"input": [{"role": "robot", "content": "x"}]}),
):
    refuses("openai", f"responses: {feature}", kind, words)(
        lambda own=fields: responses.create(**{"input": QUESTION, **OPTIONS, **own})
    )
