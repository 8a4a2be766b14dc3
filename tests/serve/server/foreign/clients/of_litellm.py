"""What people write with litellm, by each of its providers that this server is one of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import litellm
from checks import (
    ASKED,
    BASE,
    CALLS_ONCE,
    CAPITAL,
    IMAGE,
    KEY,
    MESSAGES,
    MODEL,
    NOW,
    QUESTION,
    SAID,
    SHORT,
    TOO_LONG,
    TURNS,
    URL,
    WEATHER,
    Answer,
    Made,
    Person,
    WeakModel,
    check,
    is_weather,
    refuses,
    says,
)

litellm.suppress_debug_info = True
OPENAIS = ("openai/", "hosted_vllm/")
PLACES = {"openai/": URL, "hosted_vllm/": URL, "ollama/": BASE, "ollama_chat/": BASE, "anthropic/": BASE}
STORY: list[Any] = [{"role": "user", "content": "Write a long story."}]
FORCED: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}


def complete(place: str, **fields: Any) -> Any:
    mine = {**SHORT, "messages": CAPITAL, "api_key": KEY, "api_base": PLACES[place], "num_retries": 0, **fields}
    return litellm.completion(**{**mine, "model": place + fields.get("model", MODEL)})


def text_of(found: Any) -> str:
    return found.choices[0].message.content or ""


def chat(place: str) -> None:
    whole = complete(place)
    streamed = litellm.stream_chunk_builder([*complete(place, stream=True)])
    assert text_of(streamed) == text_of(whole)
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens > 0
    assert whole.usage.prompt_tokens > 0
    says(text_of(whole), "Paris")


def turns(place: str) -> None:
    says(text_of(complete(place, messages=TURNS)), "Ada")


def options(place: str) -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "Count from 1 to 9."}], "stop": ["4"]}
    found = complete(place, **fields).choices[0]
    assert "4" not in found.message.content
    cut = complete(place, messages=fields["messages"], max_tokens=3)
    assert cut.usage.completion_tokens == 3
    assert cut.choices[0].finish_reason == ("stop" if place == "ollama/" else "length")  # there it says nothing else


def schema(place: str) -> None:
    found = complete(place, messages=MESSAGES, response_format=Person, max_tokens=200)
    Person.model_validate_json(text_of(found))
    streamed = litellm.stream_chunk_builder([*complete(place, messages=MESSAGES, response_format=Answer, stream=True)])
    Answer.model_validate_json(text_of(streamed))


def forced(place: str) -> None:
    whole = complete(place, messages=MESSAGES, **FORCED)
    streamed = litellm.stream_chunk_builder([*complete(place, messages=MESSAGES, **FORCED, stream=True)])
    for found in (whole, streamed):
        [call] = found.choices[0].message.tool_calls
        assert is_weather(call.function.name, call.function.arguments)
        assert found.choices[0].finish_reason == "tool_calls"


def offered(place: str) -> None:
    """As the model likes."""
    found = complete(place, messages=MESSAGES, tools=[WEATHER])
    if not found.choices[0].message.tool_calls:
        says(text_of(found), "<a call>")


def result(place: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    asked: list[Any] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "sunny"},
    ]
    found = complete(place, messages=asked, tools=[WEATHER]).choices[0].message
    says(found.content or str(found.tool_calls), "sunny")


def loop(place: str) -> None:
    made, messages = Made(), list(ASKED)
    for _ in range(2):
        extra: Any = {"messages": messages, "tools": [WEATHER, NOW], "extra_body": CALLS_ONCE}
        message = complete(place, **extra).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            said = made.weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    if not made.cities:
        raise WeakModel("no call")
    assert (made.cities, message.content) == (["Rome"], SAID)


def several(place: str) -> None:
    found = complete(place, n=2, seed=1, temperature=0.9, logprobs=True, top_logprobs=2, max_tokens=5)
    assert len(found.choices) == 2
    assert all(len(own.top_logprobs) == 2 for own in found.choices[0].logprobs.content)


def asynchronous(place: str) -> None:
    async def ask() -> Any:
        fields: Any = {"model": place + MODEL, "messages": CAPITAL, "api_base": PLACES[place], "api_key": KEY}
        async for _ in await litellm.acompletion(**fields, stream=True, max_tokens=500):
            break
        task = asyncio.ensure_future(litellm.acompletion(**{**fields, "messages": STORY}))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await litellm.acompletion(**fields, max_tokens=20)

    assert text_of(asyncio.run(ask()))


def embedding(place: str) -> None:
    own = litellm.embedding(model=place + MODEL, input=["a stack", "a queue"], api_base=PLACES[place], api_key=KEY).data
    assert own[0]["embedding"] != own[1]["embedding"]


ASKS: dict[str, tuple[Callable[[str], None], tuple[str, ...]]] = {
    "a chat, whole and streamed": (chat, (*PLACES,)),
    "a system prompt, several turns": (turns, (*PLACES,)),
    "`stop`, `max_tokens`": (options, (*PLACES,)),
    "`response_format` of a class, whole and streamed": (schema, (*PLACES,)),
    "a forced call, whole and streamed": (forced, ("openai/", "hosted_vllm/", "anthropic/")),
    "a tool, as the model likes": (offered, ("ollama/", "ollama_chat/", "anthropic/")),
    "what a call returned, and an answer": (result, (*PLACES,)),
    '`tool_choice="auto"`: call, result, answer (grammar)': (loop, OPENAIS),
    "`n`, `seed`, `logprobs`": (several, OPENAIS),
    "`acompletion`: a stream that is left, a task that is cancelled, a chat behind them": (asynchronous, (*PLACES,)),
    "`embedding`": (embedding, ("openai/", "hosted_vllm/", "ollama/")),
}
REFUSED: tuple[tuple[str, Any, str, dict[str, Any]], ...] = (
    ("an image", litellm.BadRequestError, "image", {"messages": IMAGE}),
    ("a wrong key", litellm.AuthenticationError, "", {"api_key": "x"}),
    ("another model", litellm.NotFoundError, "gpt-9", {"model": "gpt-9"}),
    ("a timeout", litellm.Timeout, "", {"messages": STORY, "timeout": 0.4, "max_tokens": 2000}),
)
for place in PLACES:
    for feature, (ask, places) in ASKS.items():
        if place in places:
            check("litellm", f"`{place}`: {feature}")(lambda own=place, ask=ask: ask(own))  # type: ignore[misc]
    # Of Ollama, which cuts prompts off instead, litellm knows no such error.
    too_long = litellm.BadRequestError if "ollama" in place else litellm.ContextWindowExceededError
    refuses("litellm", f"`{place}`: too long a prompt", too_long, "maximum context length")(
        lambda own=place: complete(own, messages=[{"role": "user", "content": TOO_LONG}])
    )
    for feature, kind, word, fields in REFUSED:
        refuses("litellm", f"`{place}`: {feature}", kind, word)(lambda own=place, more=fields: complete(own, **more))


@check("litellm", "`text_completion`, by `text-completion-openai/`")
def text_completion() -> None:
    own = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="def add(a, b):\n    return",
        api_base=URL,
        api_key=KEY,
        max_tokens=5,
    )
    says(own.choices[0].text, "a + b")
