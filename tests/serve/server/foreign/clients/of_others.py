"""What people write with instructor and llama-index. They cannot be in one environment with the newest of OpenAI's package."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import instructor
import openai
from checks import (
    CAPITAL,
    IMAGE,
    KEY,
    MESSAGES,
    MODEL,
    OPTIONS,
    QUESTION,
    SHORT,
    TOO_LONG,
    TURNS,
    URL,
    Address,
    Answer,
    Made,
    Person,
    check,
    refuses,
    says,
    weather,
)
from instructor.core import IncompleteOutputException
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

client = openai.OpenAI(max_retries=0)
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


@check("instructor", "`TOOLS`: `create_with_completion`, `AsyncOpenAI`, a list")
def asynchronous() -> None:
    own = instructor.from_openai(client)
    found, raw = own.chat.completions.create_with_completion(
        messages=MESSAGES, response_model=Answer, max_retries=0, **ONE
    )
    assert isinstance(found, Answer)
    assert raw.usage.completion_tokens > 0

    async def ask() -> Any:
        other = instructor.from_openai(openai.AsyncOpenAI(max_retries=0))
        return await other.chat.completions.create(
            messages=MESSAGES, response_model=list[Answer], max_retries=0, **OPTIONS
        )

    assert all(isinstance(one, Answer) for one in asyncio.run(ask()))


@check("instructor", "`RESPONSES_TOOLS`")
def responses_tools() -> None:
    own = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
    found = own.responses.create(
        input="A city.", response_model=Answer, max_retries=0, model=MODEL, max_output_tokens=60
    )
    assert isinstance(found, Answer)


refuses("instructor", "an object that is cut off", IncompleteOutputException)(
    lambda: instructor.from_openai(client).chat.completions.create(
        messages=MESSAGES, response_model=Person, max_retries=0, **{**ONE, "max_tokens": 3}
    )
)
refuses("instructor", "another model", Exception, "gpt-9")(
    lambda: instructor.from_openai(client).chat.completions.create(
        messages=MESSAGES, response_model=Answer, max_retries=0, **{**ONE, "model": "gpt-9"}
    )
)

# ---- llama-index

LLAMA = "llama-index-llms-openai-like"


def llama(**options: Any) -> OpenAILike:
    known: dict[str, Any] = {
        "api_base": URL,
        "api_key": KEY,
        "max_retries": 0,
        "is_chat_model": True,
        "context_window": 4096,
    }
    return OpenAILike(**{**known, **SHORT, "is_function_calling_model": True, **options})


def spoken(messages: list[Any]) -> list[ChatMessage]:
    return [ChatMessage(role=MessageRole(own["role"]), content=own["content"]) for own in messages]


@check(LLAMA, "`complete`, `chat`, streamed; several turns")
def llama_chat() -> None:
    own = llama()
    whole = own.chat(spoken(TURNS)).message.content
    assert [*own.stream_chat(spoken(TURNS))][-1].message.content == whole
    text = own.complete(CAPITAL[0]["content"]).text
    assert [*own.stream_complete(CAPITAL[0]["content"])][-1].text == text
    says(whole, "Ada")
    says(text, "Paris")


@check(LLAMA, "`complete` by `/v1/completions`, whole and streamed, with `logprobs`")
def llama_complete() -> None:
    own = llama(is_chat_model=False)
    text = own.complete("def add(a, b):\n    return").text
    assert [*own.stream_complete("def add(a, b):\n    return")][-1].text == text
    says(text, "a + b")


@check(LLAMA, "`achat`, `astream_chat`")
def llama_async() -> None:
    async def ask() -> list[Any]:
        own = llama()
        whole = await own.achat(spoken(CAPITAL))
        return [
            whole.message.content,
            [one.message.content async for one in await own.astream_chat(spoken(CAPITAL))][-1],
        ]

    one, other = asyncio.run(ask())
    assert one == other


@check(LLAMA, "`chat_with_tools`, `tool_required`, whole and streamed; `predict_and_call`")
def llama_tools() -> None:
    made = Made()
    tool = FunctionTool.from_defaults(made.weather, fn_schema=weather)
    own = llama()
    whole = own.chat_with_tools([tool], user_msg=QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    [call] = own.get_tool_calls_from_response(whole)
    streamed = [
        *own.stream_chat_with_tools([tool], user_msg=QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    ][-1]
    [other] = own.get_tool_calls_from_response(streamed)
    assert call.tool_name == other.tool_name == "weather"
    assert call.tool_kwargs == other.tool_kwargs
    assert str(own.predict_and_call([tool], user_msg=QUESTION, tool_required=True).response)
    assert made.cities


@check(LLAMA, "`as_structured_llm`, whole and streamed; `structured_predict`")
def llama_structured() -> None:
    own = llama(max_tokens=200, should_use_structured_outputs=True)
    for kind in (own, llama(max_tokens=200)):
        found = kind.as_structured_llm(Person).chat(spoken(MESSAGES)).raw
        assert isinstance(found, Person)
    assert isinstance([*own.as_structured_llm(Answer).stream_chat(spoken(MESSAGES))][-1].raw, Answer)


@check(LLAMA, "`FunctionAgent`, whose first call is forced")
def llama_agent() -> None:
    made = Made()
    agent = FunctionAgent(
        tools=[FunctionTool.from_defaults(made.weather, fn_schema=weather)],
        llm=llama(),
        initial_tool_choice="weather",
        allow_parallel_tool_calls=False,
    )

    async def ask() -> str:
        return str(await agent.run(QUESTION, max_iterations=3))

    said = asyncio.run(ask())
    assert made.cities
    says(said or "nothing", "sunny")


for feature, kind, word, options, messages in (
    ("another model", openai.NotFoundError, "gpt-9", {"model": "gpt-9"}, CAPITAL),
    (
        "too long a prompt",
        openai.BadRequestError,
        "context_length_exceeded",
        {},
        [{"role": "user", "content": TOO_LONG}],
    ),
    ("a wrong key", openai.AuthenticationError, "key", {"api_key": "x"}, CAPITAL),
):
    refuses(LLAMA, feature, kind, word)(lambda options=options, own=messages: llama(**options).chat(spoken(own)))
refuses(LLAMA, "an image", openai.BadRequestError, "image")(
    lambda: llama().chat(
        [
            ChatMessage.model_validate(
                {"role": "user", "blocks": [{"block_type": "image", "url": IMAGE[0]["content"][1]["image_url"]["url"]}]}
            )
        ]
    )
)
