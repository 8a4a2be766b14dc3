"""What people write with Anthropic's own package."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
from anthropic import beta_tool
from checks import (
    BASE,
    CAPITAL,
    COUNT,
    KEY,
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

client = anthropic.Anthropic(base_url=BASE, api_key=KEY, max_retries=0)
messages = client.messages
STILL: dict[str, Any] = {"extra_body": {"temperature": 0}}
SHORT: dict[str, Any] = {"model": MODEL, "max_tokens": 40, **STILL}
LONG: dict[str, Any] = {**SHORT, "max_tokens": 200}
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": WEATHER["function"]["parameters"],
}
BOTH: list[Any] = [
    {"role": "user", "content": "How is the weather in Rome, and how in Oslo?"},
    {
        "role": "assistant",
        "content": [
            {"type": "tool_use", "id": f"toolu_{city}", "name": "weather", "input": {"city": city}}
            for city in ("Rome", "Oslo")
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_Rome", "content": "sunny"},
            {"type": "tool_result", "tool_use_id": "toolu_Oslo", "content": "not known", "is_error": True},
        ],
    },
]
"""Two calls, and what they returned."""

NOW: Any = {"name": "now", "description": "The time.", "input_schema": {"type": "object", "properties": {}}}


def streamed(**fields: Any) -> tuple[Any, list[Any]]:
    """The last message of a stream, put together by the client, and its events."""
    with messages.stream(**fields) as stream:
        events = [*stream]
        return stream.get_final_message(), events


@check("anthropic", "text, whole and streamed; `count_tokens`; an id for each answer", "usage", "ids")
def text() -> None:
    whole = messages.create(messages=CAPITAL, system="Be short.", **SHORT)
    final, events = streamed(messages=CAPITAL, system="Be short.", **SHORT)
    assert "".join(own.text for own in events if own.type == "text") == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens > 0
    counted = messages.count_tokens(model=MODEL, messages=CAPITAL, system="Be short.").input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert whole.stop_reason == "end_turn"
    assert whole.id != final.id
    says(whole.content[0].text, "Paris")


@check("anthropic", "the raw events of a stream, in their order")
def events() -> None:
    kinds = [own.type for own in messages.create(messages=CAPITAL, stream=True, **SHORT)]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.index("content_block_start") < kinds.index("content_block_delta") < kinds.index("content_block_stop")


@check("anthropic", "several turns, `system` as blocks with `cache_control`, content as blocks")
def turns() -> None:
    system, *others = TURNS
    whole = messages.create(messages=others, system=system["content"], **SHORT).content[0].text
    block = {"type": "text", "text": system["content"], "cache_control": {"type": "ephemeral"}}
    parts: Any = [{"role": own["role"], "content": [{"type": "text", "text": own["content"]}]} for own in others]
    assert messages.create(messages=parts, system=[block], **SHORT).content[0].text == whole  # type: ignore[list-item]
    says(whole, "Ada")


@check("anthropic", "an answer that the last message begins; `stop_sequences`; cut off by `max_tokens`", "usage")
def begun() -> None:
    asked: list[Any] = [{"role": "user", "content": "Count from 1 to 9."}, {"role": "assistant", "content": "1, 2, 3,"}]
    own = messages.create(messages=asked, stop_sequences=["7"], **SHORT)
    if own.stop_reason == "stop_sequence":
        assert own.stop_sequence == "7"
    cut = messages.create(messages=asked, **{**SHORT, "max_tokens": 2})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    says(own.content[0].text, "4")


@check("anthropic", "`temperature`, `top_p`, `top_k`, `metadata`, `thinking` and `service_tier` are taken")
def options() -> None:
    taken: dict[str, Any] = {"top_p": 0.9, "top_k": 20, "metadata": {"user_id": "x"}, "service_tier": "auto"}
    body = {**taken, "temperature": 0.5, "thinking": {"type": "disabled"}}
    assert messages.create(model=MODEL, max_tokens=5, messages=CAPITAL, extra_body=body).content


@check("anthropic", '`tool_choice`: "any" ends by itself, whole and streamed')
def any_tool() -> None:
    fields: dict[str, Any] = {"messages": ASKED, "tools": [TOOL, NOW], "tool_choice": {"type": "any"}, **LONG}
    whole = messages.create(**fields)
    final, events = streamed(**fields)
    assert whole.stop_reason == final.stop_reason == "tool_use"
    assert [own.input for own in whole.content] == [own.input for own in final.content]
    assert any(own.type == "input_json" for own in events)
    assert all(own.name == "now" or is_weather(own.name, json.dumps(own.input)) for own in whole.content)


@check(
    "anthropic",
    "`thinking` with its `budget_tokens`, whole and streamed: a thought and a text, each with its index",
    "index",
)
def thinking() -> None:
    wish: Any = {"type": "enabled", "budget_tokens": 8}
    whole = messages.create(messages=COUNT, thinking=wish, **LONG)
    thought, text = whole.content
    assert (thought.type, text.type, bool(thought.thinking), bool(text.text)) == ("thinking", "text", True, True)
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    final, _ = streamed(messages=COUNT, thinking=wish, **LONG)
    assert [own.model_dump() for own in final.content] == [own.model_dump() for own in whole.content]


@check("anthropic", "a tool by its name; its result; an answer")
def named() -> None:
    choice: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    own = messages.create(messages=ASKED, tools=[NOW, TOOL], tool_choice=choice, **LONG)
    [block] = own.content
    assert is_weather(block.name, json.dumps(block.input))
    result: Any = [{"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}]}]
    asked: list[Any] = [*ASKED, {"role": "assistant", "content": own.content}, {"role": "user", "content": result}]
    found = messages.create(messages=asked, tools=[TOOL], **SHORT)
    says("".join(one.text for one in found.content if one.type == "text") or str(found.content), "sunny")


@check("anthropic", '`tool_choice`: "auto" as the model likes, and "none"')
def auto() -> None:
    none = messages.create(messages=ASKED, tools=[TOOL], tool_choice={"type": "none"}, **SHORT)
    assert [own.type for own in none.content] == ["text"]
    own = messages.create(messages=ASKED, tools=[TOOL], **SHORT)
    if own.stop_reason != "tool_use":
        says(own.content[0].text, "<a call>")


@check("anthropic", "several calls of one answer, an error among their results (`is_error`)")
def parallel() -> None:
    own = messages.create(messages=BOTH, tools=[TOOL], **SHORT)
    assert own.content


def runner(stream: bool) -> list[str]:
    cities: list[str] = []

    @beta_tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name.
        """
        cities.append(city)
        return "sunny"

    forced: Any = {"type": "any", "disable_parallel_tool_use": True}
    run = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=40, tools=[weather], messages=ASKED, tool_choice=forced, stream=stream, max_iterations=2
    )
    for turn in run:
        message = turn.get_final_message() if stream else turn
        assert all(own.type == "tool_use" for own in message.content) or cities
        run.set_messages_params(lambda old: {**old, "tool_choice": {"type": "auto"}})
    return cities


@check("anthropic", "`tool_runner`, whole and streamed: a forced call, its function, an answer")
def tool_runner() -> None:
    assert all(runner(stream) for stream in (False, True))


@check("anthropic", "`messages.parse` of classes; `output_config`, streamed")
def parse() -> None:
    own = messages.parse(messages=ASKED, output_format=Answer, **SHORT)
    assert isinstance(own.parsed_output, Answer)
    assert isinstance(messages.parse(messages=ASKED, output_format=Person, **LONG).parsed_output, Person)
    with messages.stream(messages=ASKED, output_format=Answer, **SHORT) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Answer)


@check("anthropic", "`models.list`, `models.retrieve`; raw responses")
def models() -> None:
    assert [own.id for own in client.models.list()] == [client.models.retrieve(MODEL).id] == [MODEL]
    assert messages.with_raw_response.create(messages=CAPITAL, **SHORT).parse().content


@check("anthropic", "a stream that is closed, a task that is cancelled, and a message behind them")
def cancelled() -> None:
    long: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 2000,
        "messages": [{"role": "user", "content": "Write a long story."}],
    }
    with messages.stream(**long) as stream:
        next(iter(stream))

    async def cancel() -> None:
        async with anthropic.AsyncAnthropic(base_url=BASE, api_key=KEY) as own:
            task = asyncio.ensure_future(own.messages.create(**long))
            await asyncio.sleep(0.5)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancel())
    assert messages.create(messages=CAPITAL, **SHORT).content


SOURCE = {"type": "base64", "media_type": "image/png", "data": PIXEL}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
for feature, kind, words, fields in (
    ("another model", anthropic.NotFoundError, "gpt-9", {"model": "gpt-9"}),
    (
        "too long a prompt",
        anthropic.BadRequestError,
        "prompt is too long",
        {"messages": [{"role": "user", "content": TOO_LONG}]},
    ),
    (
        "an image",
        anthropic.BadRequestError,
        "image",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]},
    ),
    (
        "a document",
        anthropic.BadRequestError,
        "document",
        {"messages": [{"role": "user", "content": [{"type": "document", "source": SOURCE}]}]},
    ),
    ("a tool that Anthropic runs", anthropic.BadRequestError, "web_search", {"tools": [SEARCH]}),
    ("`top_p: 5`", anthropic.BadRequestError, "top_p", {"extra_body": {"top_p": 5}}),
    ("an unknown field", anthropic.BadRequestError, "topp", {"extra_body": {"topp": 1}}),
    (
        "a result without its call",
        anthropic.BadRequestError,
        "toolu_9",
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_9", "content": "x"}]}
            ]
        },
    ),
    ("`max_tokens: 0`", anthropic.BadRequestError, "max_tokens", {"max_tokens": 0}),
):
    refuses("anthropic", feature, kind, words)(
        lambda own=fields: messages.create(**{"messages": CAPITAL, **SHORT, **own})
    )
refuses("anthropic", "a wrong key", anthropic.AuthenticationError, "key")(
    lambda: client.with_options(api_key="x").messages.create(messages=CAPITAL, **SHORT)
)
refuses("anthropic", "a timeout of the client", anthropic.APITimeoutError)(
    lambda: client.with_options(timeout=0.3).messages.create(
        messages=[{"role": "user", "content": "Count from 1 to 500."}], model=MODEL, max_tokens=2000, **STILL
    )
)
refuses("anthropic", "`batches`", anthropic.NotFoundError)(lambda: messages.batches.list())
