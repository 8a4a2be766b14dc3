"""Every field of a request is taken, tolerated or refused by its name: none is dropped in silence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nanoengine.server.protocol import IGNORED, REFUSED, ChatRequest, CompletionRequest, Generation
from tests.server.running import Answer, Server

PATHS: dict[str, type[Generation]] = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
SOMETHING: list[Any] = [1, 2.5, True, "x", [1], {"a": 1}]


def send(server: Server, path: str, **fields: Any) -> Answer:
    own = {"prompt": "abc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "abc"}]}
    return server.post(path, own | {"max_tokens": 2} | fields)


def names_of(path: str) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(PATHS[path])}


@pytest.mark.parametrize("path", PATHS)
def test_what_cannot_be_done_is_refused_by_its_name(parrot: Server, path: str) -> None:
    for name, neutral in REFUSED.items():
        for value in SOMETHING:
            answer = send(parrot, path, **{name: value})
            if value in neutral:
                assert answer.status == 200
            else:
                assert (answer.status, answer.error["param"]) == (400, name), (name, value)
                assert name in answer.error["message"]


@pytest.mark.parametrize("path", PATHS)
def test_what_asks_for_nothing_is_taken(parrot: Server, path: str) -> None:
    for name, neutral in REFUSED.items():
        if name in names_of(path):
            for value in (None, *neutral):
                assert send(parrot, path, **{name: value}).status == 200, (name, value)


@pytest.mark.parametrize("path", PATHS)
def test_what_can_change_nothing_is_tolerated(parrot: Server, path: str) -> None:
    text = send(parrot, path).json["choices"]
    tolerated = [name for name in IGNORED if name in names_of(path)]
    assert tolerated
    for name in tolerated:
        for value in (None, *SOMETHING):
            assert send(parrot, path, **{name: value}).json["choices"] == text


@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize", "/abort_requests"])
@pytest.mark.parametrize("name", ["unknown", "Temperature", "top-p", "", "__class__", "max_tokenss"])
def test_what_nobody_knows_is_refused_by_its_name(parrot: Server, path: str, name: str) -> None:
    own = {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [1]}}.get(path, {})
    answer = send(parrot, path, **{name: 1}) if path in PATHS else parrot.post(path, {**own, name: 1})
    assert answer.status == 400
    assert (name or "unknown field") in answer.error["message"]
    if name:
        assert answer.error["param"] == name


@pytest.mark.parametrize("path", PATHS)
def test_null_is_as_good_as_nothing(parrot: Server, path: str) -> None:
    """Many clients write null for what they do not set."""
    choices = send(parrot, path).json["choices"]
    required = {"prompt", "messages", "max_tokens", "add_generation_prompt", "continue_final_message", "priority"}
    for name in sorted(names_of(path) - required):
        answer = send(parrot, path, **{name: None})
        assert answer.status == 200, (name, answer.body)
        assert answer.json["choices"] == choices


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e6}, None),  # vLLM takes it, and so may we: what matters is that it ends
        ({"top_p": -1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 10**30}, "n"),
        ({"n": True}, "n"),
        ({"n": 5}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 5000}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"stream": "yes"}, "stream"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"unknown": True}}, "stream_options"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"cache_salt": "a\nb"}, "cache_salt"),
        ({"priority": 2**63}, "priority"),
        ({"request_id": 5}, "request_id"),
        ({"model": "other"}, "model"),
        ({"model": 5}, "model"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", PATHS)
def test_values_outside_their_range_are_refused_by_field(
    parrot: Server, path: str, fields: dict[str, Any], param: str | None
) -> None:
    answer = send(parrot, path, **fields)
    if param is None:
        assert answer.status in (200, 400)
        return
    assert answer.status == (404 if fields == {"model": "other"} else 400), answer.body
    assert answer.error["param"] == param


def test_plain_text_is_a_format(parrot: Server) -> None:
    for path in PATHS:
        assert send(parrot, path, response_format={"type": "text"}).status == 200
