"""What people write with OpenAI's own package: texts, embeddings, and what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from checks import (
    CAPITAL,
    COUNT,
    IMAGE,
    MESSAGES,
    MODEL,
    NOW,
    OPTIONS,
    SHORT,
    TOO_LONG,
    TURNS,
    are_likely,
    check,
    refuses,
    says,
)

NAMED = {"type": "function", "function": {"name": "weather"}}
client = openai.OpenAI(max_retries=0)
chat = client.chat.completions


# ---- texts


@check("openai", "a chat; its stream with usage")
def chats() -> None:
    whole = chat.create(messages=CAPITAL, **SHORT)
    pieces = [*chat.create(messages=CAPITAL, stream=True, stream_options={"include_usage": True}, **SHORT)]
    text = "".join(own.choices[0].delta.content or "" for own in pieces if own.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.choices[0].finish_reason == "stop"
    says(text, "Paris")


@check("openai", "a system prompt, several turns; parts of content, the role `developer`")
def turns() -> None:
    whole = chat.create(messages=TURNS, **SHORT).choices[0].message.content
    parts = [{"role": own["role"], "content": [{"type": "text", "text": own["content"]}]} for own in TURNS]
    assert chat.create(messages=parts, **SHORT).choices[0].message.content == whole
    parts[0]["role"] = "developer"
    assert chat.create(messages=parts, **SHORT).choices[0].message.content == whole
    says(whole, "Ada")


@check(
    "openai",
    "`n`, `seed`: different, and the same again; each choice has its index, each answer its id",
    "index",
    "ids",
)
def several() -> None:
    fields: dict[str, Any] = {"messages": MESSAGES, "n": 3, **OPTIONS, "max_tokens": 12}
    found = [chat.create(**fields) for _ in range(2)]
    texts = [[own.message.content for own in one.choices] for one in found]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    assert [own.index for own in found[0].choices] == [0, 1, 2]
    streamed, ids = ["", "", ""], {own.id for own in found}
    for chunk in chat.create(stream=True, **fields):
        ids.add(chunk.id)
        for own in chunk.choices:
            streamed[own.index] += own.delta.content or ""
    assert streamed == texts[0]
    assert len(ids) == 3


@check("openai", "`stop`, one and several; `max_completion_tokens`", "usage")
def stops() -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "Count from 1 to 9."}], **SHORT}
    text = chat.create(**fields).choices[0].message.content
    for stop in ("4", ["4", "9"]):
        found = chat.create(stop=stop, **fields).choices[0]
        assert (found.message.content, found.finish_reason) == (text.split("4")[0], "stop")
    fields.pop("max_tokens")
    found = chat.create(max_completion_tokens=3, **fields)
    assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (3, "length")


@check("openai", "`logprobs`, whole and streamed; `logit_bias`, penalties", "logprobs")
def probabilities() -> None:
    fields: dict[str, Any] = {"messages": CAPITAL, "logprobs": True, "top_logprobs": 20, **SHORT}
    found = chat.create(**fields).choices[0]
    whole = found.logprobs.content
    assert "".join(own.token for own in whole) == found.message.content
    assert all(
        (own.token, own.logprob) == (own.top_logprobs[0].token, own.top_logprobs[0].logprob) for own in whole[:-1]
    )
    are_likely([own.logprob for own in whole], [[one.logprob for one in own.top_logprobs] for own in whole])
    stream = chat.create(stream=True, **fields)
    assert [one for own in stream if own.choices[0].logprobs for one in own.choices[0].logprobs.content] == whole
    assert all(len(own.top_logprobs) == 20 for own in whole)
    ids = client.post("../tokenize", body={"model": MODEL, "prompt": whole[0].token}, cast_to=dict)["tokens"]
    bias = {"logit_bias": {str(ids[0]): -100}, "frequency_penalty": 0.5, "presence_penalty": 0.5}
    assert chat.create(messages=CAPITAL, **bias, **SHORT).choices[0].message.content != whole[0].token


@check("openai", "`completions`: text, stream, several prompts, token ids, `echo` with `logprobs`, `suffix`", "index")
def completions() -> None:
    ask = client.completions.create
    fields: dict[str, Any] = {**SHORT, "max_tokens": 8}
    whole = ask(prompt="def add(a, b):", **fields).choices[0].text
    assert "".join(own.choices[0].text for own in ask(prompt="def add(a, b):", stream=True, **fields)) == whole
    several = ask(prompt=["def add(a, b):", "import "], **fields).choices
    assert [(own.index, own.text) for own in several] == [
        (0, whole),
        (1, ask(prompt="import ", **fields).choices[0].text),
    ]
    assert ask(prompt=[1, 2, 3], **fields).choices[0].text is not None
    echo = ask(prompt="def add(a, b):", echo=True, logprobs=1, **{**fields, "max_tokens": 0}).choices[0]
    assert echo.text == "def add(a, b):"
    assert (echo.logprobs.token_logprobs[0], len(echo.logprobs.tokens)) == (None, len(echo.logprobs.token_logprobs))
    says(ask(prompt="def add(a, b):\n    return ", suffix="\n", **fields).choices[0].text, "a + b")


@check("openai", "`completions`: `logprobs` of an answer, which are those of its `echo`", "logprobs")
def echo_of_an_answer() -> None:
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "logprobs": 5}
    ask, body = client.completions.create, {"return_token_ids": True}
    whole = ask(prompt="def add(a, b):", max_tokens=12, extra_body=body, **fields).choices[0]
    own = whole.logprobs
    assert "".join(own.tokens) == whole.text
    are_likely(own.token_logprobs, [[*table.values()] for table in own.top_logprobs])
    ids = client.post("../tokenize", body={"model": MODEL, "prompt": "def add(a, b):"}, cast_to=dict)["tokens"]
    echo = ask(prompt=[*ids, *whole.token_ids], max_tokens=0, echo=True, **fields).choices[0]
    assert "".join(echo.logprobs.tokens) == echo.text == "def add(a, b):" + whole.text
    pairs = [*zip(own.token_logprobs, echo.logprobs.token_logprobs[len(ids) :], strict=True)]
    assert all(abs(one - other) < 0.1 for one, other in pairs), pairs


@check("openai", "`reasoning_effort` and a limit of the thought, whole and streamed: a thought, and an answer", "usage")
def thoughts() -> None:
    fields: dict[str, Any] = {
        "messages": COUNT,
        "reasoning_effort": "high",
        "extra_body": {"thinking_budget": 8},
        **SHORT,
    }
    whole = chat.create(**fields)
    message, numbers = whole.choices[0].message, whole.usage
    assert message.content
    assert message.reasoning_content
    deltas = [own.choices[0].delta for own in chat.create(stream=True, **fields)]
    assert "".join(getattr(own, "reasoning_content", "") or "" for own in deltas) == message.reasoning_content
    assert "".join(own.content or "" for own in deltas) == message.content
    cut = chat.create(**fields | {"max_tokens": 4}).usage
    assert cut.completion_tokens_details.reasoning_tokens == cut.completion_tokens == 4
    assert 8 < numbers.completion_tokens_details.reasoning_tokens < numbers.completion_tokens


@check("openai", "`json_object`")
def json_object() -> None:
    kind: Any = {"type": "json_object"}
    asked: list[Any] = [{"role": "user", "content": "The city of Rome and its country, as JSON."}]
    found = chat.create(messages=asked, response_format=kind, **{**SHORT, "max_tokens": 100}).choices[0]
    if found.finish_reason == "stop":
        assert isinstance(json.loads(found.message.content), dict)
    else:
        says(found.message.content, "that it ends")


@check("openai", "`models.list`, `models.retrieve`; raw responses")
def models() -> None:
    assert [own.id for own in client.models.list()] == [client.models.retrieve(MODEL).id] == [MODEL]
    assert chat.with_raw_response.create(messages=CAPITAL, **SHORT).parse().choices[0].message.content
    with chat.with_streaming_response.create(messages=CAPITAL, stream=True, **SHORT) as response:
        assert [*response.iter_lines()][-2:][0] == "data: [DONE]"


@check("openai", "a stream that is closed, a task that is cancelled, and a chat behind them")
def cancelled() -> None:
    long: dict[str, Any] = {"messages": CAPITAL, **SHORT, "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    with chat.create(stream=True, **long) as stream:
        next(iter(stream))

    async def cancel() -> None:
        async with openai.AsyncOpenAI() as own:
            task = asyncio.ensure_future(own.chat.completions.create(**long))
            await asyncio.sleep(0.5)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancel())
    assert chat.create(messages=CAPITAL, **SHORT).choices[0].message.content


# ---- what is refused

for feature, kind, words, fields in (
    ("another model", openai.NotFoundError, "gpt-9", {"model": "gpt-9"}),
    (
        "too long a prompt",
        openai.BadRequestError,
        "maximum context length",
        {"messages": [{"role": "user", "content": TOO_LONG}]},
    ),
    (
        "too long a prompt: its code",
        openai.BadRequestError,
        "context_length_exceeded",
        {"messages": [{"role": "user", "content": TOO_LONG}]},
    ),
    ("an image", openai.BadRequestError, "image", {"messages": IMAGE}),
    (
        "`audio`",
        openai.BadRequestError,
        "audio",
        {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}},
    ),
    ("`temperature: -1`", openai.BadRequestError, "temperature", {"temperature": -1}),
    ('`temperature: "hot"`', openai.BadRequestError, "temperature", {"temperature": "hot"}),
    ("`n: 0`", openai.BadRequestError, "n", {"n": 0}),
    ("`n: 1000`", openai.BadRequestError, "max_n", {"n": 1000}),
    ("an unknown field", openai.BadRequestError, "top_k", {"extra_body": {"topk": 3}}),
    ("`guided_json`", openai.BadRequestError, "structured_outputs", {"extra_body": {"guided_json": {}}}),
    ("a tool that there is not", openai.BadRequestError, "weather", {"tools": [NOW], "tool_choice": NAMED}),
    ("an unknown role", openai.BadRequestError, "role", {"messages": [{"role": "robot", "content": "x"}]}),
    (
        "a result without its call",
        openai.BadRequestError,
        "tool_call_id",
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "none"}]},
    ),
    ("no message", openai.BadRequestError, "messages", {"messages": []}),
):
    refuses("openai", feature, kind, words)(lambda own=fields: chat.create(**{"messages": CAPITAL, **SHORT, **own}))
refuses("openai", "`models.retrieve` of another", openai.NotFoundError)(lambda: client.models.retrieve("gpt-9"))
refuses("openai", "a wrong key", openai.AuthenticationError, "key")(
    lambda: client.with_options(api_key="sk-1").chat.completions.create(messages=CAPITAL, **SHORT)
)
refuses("openai", "a timeout of the client", openai.APITimeoutError)(
    lambda: client.with_options(timeout=0.3).chat.completions.create(
        messages=CAPITAL, **SHORT | {"max_tokens": 2000}, extra_body={"ignore_eos": True}
    )
)
refuses("openai", "`moderations`", openai.NotFoundError)(lambda: client.moderations.create(input="x"))
refuses("openai", "`images`", openai.NotFoundError)(lambda: client.images.generate(prompt="x"))


# ---- embeddings


@check("openai", "`embeddings`: base64 as it asks by itself, floats, token ids, dimensions")
def embeddings() -> None:
    texts = ["a stack", "a queue"]
    own = client.embeddings.create(model=MODEL, input=texts)
    floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [one.embedding for one in own.data] == [one.embedding for one in floats.data]
    assert own.usage.prompt_tokens == own.usage.total_tokens > 0
    [short] = client.embeddings.create(model=MODEL, input=[1, 2, 3], dimensions=8).data
    assert len(short.embedding) == 8
    assert abs(sum(number * number for number in short.embedding) - 1) < 1e-6
