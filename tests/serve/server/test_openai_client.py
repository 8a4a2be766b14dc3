"""OpenAI's own package speaks to the server: what it parses, its types accept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.server.running import Server

MESSAGES = [{"role": "system", "content": "A module."}, {"role": "user", "content": "Write a function."}]
PROMPT = "def binary_search("


def opened(server: Server, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, **options)


@pytest.fixture(scope="module")
def client(demo: Server) -> Iterator[openai.OpenAI]:
    with opened(demo) as own:
        yield own


@pytest.fixture(scope="module")
def strict(demo: Server) -> Iterator[openai.OpenAI]:
    """Raises what does not fit the types, which those of streamed completions themselves do not: an end is no null there."""
    with opened(demo, _strict_response_validation=True) as own:
        yield own


def test_models(strict: openai.OpenAI) -> None:
    [model] = strict.models.list().data
    assert model.id == "demo"
    assert strict.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError):
        strict.models.retrieve("other")


def test_a_completion_whole_and_streamed(client: openai.OpenAI, strict: openai.OpenAI) -> None:
    fields = {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 2, "n": 2}
    whole = strict.completions.create(**fields)
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [texts[choice.index] for choice in whole.choices] == [choice.text for choice in whole.choices]
    assert whole.usage.completion_tokens == 16
    assert whole.choices[0].logprobs.tokens
    assert whole.choices[0].finish_reason == "length"


def test_a_chat_whole_and_streamed(strict: openai.OpenAI) -> None:
    fields = {"model": "demo", "messages": MESSAGES, "max_completion_tokens": 8, "temperature": 0, "stop": ["\n\n"]}
    whole = strict.chat.completions.create(**fields, logprobs=True, top_logprobs=1)
    chunks = list(strict.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens


def test_errors_are_the_packages_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="demo", prompt=PROMPT, temperature=-1)
    assert refused.value.param == "temperature"
    assert refused.value.status_code == 400
    assert "temperature is -1" in refused.value.message
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(model="demo", messages=MESSAGES, response_format={"type": "xml"})


def test_an_error_in_a_stream_is_raised(parrot: Server) -> None:
    with opened(parrot) as own:
        stream = own.completions.create(model="parrot", prompt="\x01abc", stream=True)
        with pytest.raises(openai.APIError, match="the step broke"):
            list(stream)
