"""OpenAI's own package speaks to the server: what it parses, its types accept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import openai
import pytest

from conformance.clients.spoiler import spoiler
from tests.serve.server.running import Server

MESSAGES = [{"role": "system", "content": "A module."}, {"role": "user", "content": "Write a function."}]
PROMPT = "def binary_search("


def opened(url: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, **options)


@pytest.fixture(scope="module")
def client(demo: Server) -> Iterator[openai.OpenAI]:
    with opened(demo.url) as own:
        yield own


@pytest.fixture(scope="module")
def strict(demo: Server) -> Iterator[openai.OpenAI]:
    """Raises what does not fit the types, which those of streamed completions themselves do not: an end is no null there."""
    with opened(demo.url, _strict_response_validation=True) as own:
        yield own


def test_models(strict: openai.OpenAI) -> None:
    [model] = strict.models.list().data
    assert model.id == "demo"
    assert strict.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError):
        strict.models.retrieve("other")


# ---- what is told with a text, and that a check of it fails where it is wrong


def logprobs(client: openai.OpenAI) -> None:
    """Those of the likeliest tokens, whose probabilities are known: of all tokens together they are 1."""
    fields: dict[str, Any] = {"model": "demo", "temperature": 0, "logprobs": 20}
    whole = client.completions.create(**fields, prompt=PROMPT, max_tokens=8).choices[0]
    chat = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=20
    ).choices[0]
    tokens, told = whole.logprobs.tokens, whole.logprobs.token_logprobs
    assert "".join(tokens) == whole.text
    assert "".join(own.token for own in chat.logprobs.content) == chat.message.content
    echo = client.completions.create(**fields, prompt=PROMPT + whole.text, max_tokens=0, echo=True).choices[0].logprobs
    assert echo.tokens[-len(tokens) :] == tokens
    assert echo.token_logprobs[-len(tokens) :] == pytest.approx(told, abs=1e-3)
    top = [[*table.values()] for table in whole.logprobs.top_logprobs]
    top += [[own.logprob for own in one.top_logprobs] for one in chat.logprobs.content]
    assert [*told, *(own.logprob for own in chat.logprobs.content)] == [max(own) for own in top]
    sums = [sum(map(math.exp, own)) for own in top]
    assert 0.9 < max(sums) < 1.001


def index(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "demo", "prompt": [PROMPT, "import "], "max_tokens": 8, "n": 2, "seed": 1}
    whole, texts = client.completions.create(**fields).choices, ["", "", "", ""]
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [choice.index for choice in whole] == [0, 1, 2, 3]
    assert texts == [choice.text for choice in whole]
    assert len({*texts}) == 4


def usage(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "demo", "max_tokens": 8, "n": 2, "extra_body": {"ignore_eos": True}}
    numbers = client.completions.create(**fields, prompt=[1, 2, 3]).usage
    assert (numbers.prompt_tokens, numbers.completion_tokens, numbers.total_tokens) == (3, 16, 19)
    *_, last = client.completions.create(**fields, prompt=[1, 2], stream=True, stream_options={"include_usage": True})
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 16)


def ids(client: openai.OpenAI) -> None:
    found = [client.completions.create(model="demo", prompt=PROMPT, max_tokens=1).id for _ in range(2)]
    assert len({*found}) == 2


@pytest.mark.parametrize("check", [logprobs, index, usage, ids], ids=lambda own: own.__name__)
def test_what_is_told_with_a_text_is_right_and_not_if_it_is_spoiled(
    demo: Server, check: Callable[[openai.OpenAI], None]
) -> None:
    for kind in ("nothing", check.__name__):
        outcome = nullcontext() if kind == "nothing" else pytest.raises(AssertionError)
        with spoiler(demo.url, kind) as url, opened(url) as other, outcome:
            check(other)


def test_a_completion_fits_the_types(strict: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "logprobs": 2, "n": 2}
    assert strict.completions.create(**fields).choices[0].finish_reason == "length"


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
    with opened(parrot.url) as own:
        stream = own.completions.create(model="parrot", prompt="\x01abc", stream=True)
        with pytest.raises(openai.APIError, match="the step broke"):
            list(stream)
