"""What programs do with the openai package: sync, async, streamed, against the server at $SERVER_URL. pytest runs it by name."""

from __future__ import annotations

import asyncio
import os

import openai
import pytest

URL = os.environ["SERVER_URL"] + "/v1"
CHAT = [{"role": "user", "content": "Name three fruits."}]


@pytest.fixture
def client():
    with openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def model(client):
    return client.models.list().data[0].id


def test_a_completion_and_its_stream_are_the_same_text(client, model):
    asked = {"model": model, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chat_and_its_stream_are_the_same_text(client, model):
    asked = {"model": model, "messages": CHAT, "max_completion_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def test_the_package_puts_a_stream_together_itself(client, model):
    with client.chat.completions.stream(model=model, messages=CHAT, max_completion_tokens=16, temperature=0) as stream:
        events = [event.type for event in stream]
        completion = stream.get_final_completion()
    assert "content.delta" in events
    assert completion.choices[0].message.content


def test_several_choices_come_under_their_indexes(client, model):
    asked = {"model": model, "messages": CHAT, "max_completion_tokens": 8, "n": 3, "seed": 7, "temperature": 1}
    whole = client.chat.completions.create(**asked)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert texts == [choice.message.content for choice in whole.choices]


def test_logprobs_belong_to_the_tokens(client, model):
    answer = client.chat.completions.create(
        model=model, messages=CHAT, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    assert all(len(token.top_logprobs) == 3 and token.logprob == token.top_logprobs[0].logprob for token in tokens)
    text = b"".join(bytes(token.bytes) for token in tokens).decode()
    assert text.startswith(answer.choices[0].message.content)


def test_a_stop_string_ends_the_text(client, model):
    asked = {"model": model, "prompt": "1, 2, 3, 4, 5,", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[len(whole) // 2 :][:2]
    answer = client.completions.create(**asked, stop=[stop]).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.text == whole[: whole.index(stop)]
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stop=[stop], stream=True))
    assert streamed == answer.text


@pytest.mark.parametrize(
    ("error", "changed"),
    [
        (openai.NotFoundError, {"model": "no-such-model"}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"max_tokens": 0}),
        (openai.BadRequestError, {"max_tokens": "many"}),
        (openai.BadRequestError, {"prompt": []}),
        (openai.BadRequestError, {"prompt": "word " * 100_000}),
        (openai.BadRequestError, {"extra_body": {"no_such_field": 1, "use_beam_search": True}}),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_their_classes(client, model, error, changed, stream):
    with pytest.raises(error) as raised:
        client.completions.create(**{"model": model, "prompt": "Hello", "stream": stream} | changed)
    assert set(raised.value.body) == {"message", "type", "param", "code"}
    assert raised.value.body["code"] == raised.value.status_code


def test_many_at_once_are_as_good_as_alone(model):
    prompts = [f"Chapter {number}. In the beginning" for number in range(16)]

    async def ask(client, prompt):
        stream = await client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run(at_once):
        limit = asyncio.Semaphore(at_once)
        async with openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0, timeout=120) as client:

            async def one(prompt):
                async with limit:
                    return await ask(client, prompt)

            return await asyncio.gather(*map(one, prompts))

    together, alone = asyncio.run(run(16)), asyncio.run(run(1))
    assert all(together)
    assert sum(a == b for a, b in zip(together, alone, strict=True)) >= 14  # rounding may turn a tie


def test_who_goes_away_leaves_nothing_running(client, model):
    stream = client.completions.create(
        model=model, prompt="Once", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            model=model, prompt="Once", max_tokens=2000, extra_body={"ignore_eos": True}
        )

    async def none_runs():
        import httpx

        async with httpx.AsyncClient() as web:
            text = (await web.get(os.environ["SERVER_URL"] + "/metrics")).text
        return (
            next(line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")).split()[-1]
            == "0.0"
        )

    async def soon():
        for _ in range(50):
            if await none_runs():
                return True
            await asyncio.sleep(0.1)
        return False

    assert asyncio.run(soon())
