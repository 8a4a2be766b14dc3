"""Every field of a request is taken, tolerated or refused by its name: none is dropped in silence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nanoengine.server.errors import Problem
from nanoengine.server.fields import IGNORED, REFUSED
from nanoengine.server.protocol import ChatRequest, CompletionRequest, Generation
from tests.server.running import Answer, Server

PATHS: dict[str, type[Generation]] = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}


def send(server: Server, path: str, **fields: Any) -> Answer:
    own = {"prompt": "abc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "abc"}]}
    return server.post(path, own | {"max_tokens": 2} | fields)


def names_of(path: str) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(PATHS[path])}


@pytest.mark.parametrize("path", PATHS)
def test_what_cannot_be_done_is_refused_by_its_name(parrot: Server, path: str) -> None:
    for name, neutral in REFUSED.items():
        for value in (2.5, "x", [1], {"a": 1}, *neutral, None):
            answer = send(parrot, path, **{name: value})
            if value is None or value in neutral:
                assert answer.status == (200 if name in names_of(path) else 400), (name, value)
            else:
                assert (answer.status, answer.error["param"]) == (400, name), (name, value)
                assert name in answer.error["message"]


@pytest.mark.parametrize("path", PATHS)
def test_what_can_change_nothing_is_tolerated(parrot: Server, path: str) -> None:
    """So is null, which many clients write for what they do not set."""
    text = send(parrot, path).json["choices"]
    tolerated = [name for name in IGNORED if name in names_of(path)]
    assert tolerated
    required = {"prompt", "messages", "max_tokens", "add_generation_prompt", "continue_final_message", "priority"}
    for name in sorted(names_of(path) - required):
        for value in (None, *([1, "x", {"a": 1}] if name in tolerated else [])):
            assert send(parrot, path, **{name: value}).json["choices"] == text, (name, value)


@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize", "/abort_requests"])
def test_what_nobody_knows_is_refused_by_its_name(parrot: Server, path: str) -> None:
    own = {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [1]}}.get(path, {})
    for name in ("unknown", "Temperature", "top-p", "", "__class__", "max_tokenss"):
        answer = send(parrot, path, **{name: 1}) if path in PATHS else parrot.post(path, {**own, name: 1})
        assert answer.status == 400
        assert (name or "unknown field") in answer.error["message"]
        assert not name or answer.error["param"] == name


OUTSIDE: dict[str, list[Any]] = {
    "temperature": ["hot", -0.1],
    "top_p": [-1, 1.1],
    "top_k": [-2, 1.5],
    "min_p": [2],
    "n": [0, -1, 10**30, True, 5],
    "max_tokens": [-1, "5"],
    "min_tokens": [5],
    "seed": [2**63, 0.5],
    "stop": [["a", "b", "c", "d", "e"], [""], "", [1]],
    "stop_token_ids": [[-1], [10**6]],
    "presence_penalty": [3],
    "frequency_penalty": [-3],
    "repetition_penalty": [0],
    "logit_bias": [{"a": 1}, {"-1": 1}, {"99999": 1}, {"5": "x"}],
    "allowed_token_ids": [[], [10**6]],
    "bad_words": [[""]],
    "truncate_prompt_tokens": [-2, 5000],
    "truncation_side": ["middle"],
    "stream": ["yes"],
    "stream_interval": [0],
    "stream_options": [{"include_usage": True}],  # without a stream
    "response_format": [{"type": "xml"}, {"type": "json_schema"}],
    "prompt_logprobs": [21, -2],
    "cache_salt": ["a\nb"],
    "priority": [2**63],
    "request_id": [5],
    "model": [5],
}


NO_PROMPTS: list[Any] = [
    *(None, "", [], [[]], [""], ["a", ""], [[1], []], [1, "a"], [1, [2]], 5, {"a": 1}, [None], [True], [-1], [1.5]),
    *([2**40], [[2**31]], [100000], [["a"]], [[[1]]], "x" * 1024, [1] * 1024, ["a"] * 9, [[1]] * 9),
]
OF_ONE: dict[str, dict[str, list[Any]]] = {
    "/v1/completions": {"prompt": NO_PROMPTS, "max_tokens": [1025], "best_of": [0, -1]},
    "/v1/chat/completions": {"tool_choice": ["required", "any", {"type": "function"}], "top_logprobs": [2]},
}


@pytest.mark.parametrize("path", PATHS)
def test_values_outside_their_range_are_refused_by_field(parrot: Server, path: str) -> None:
    before = parrot.metrics().num_requests
    cases = [{name: value} for name, values in (OUTSIDE | OF_ONE[path]).items() for value in values]
    in_streams = [{"stream_options": {"unknown": True}}, {"prompt_logprobs": 1}, {"best_of": 2}]
    for fields in (*cases, *(own | {"stream": True} for own in in_streams)):
        answer = send(parrot, path, **fields)
        assert (answer.status, answer.error["param"]) == (400, next(iter(fields))), (fields, answer.body)
    answer = send(parrot, path, model="other")
    assert (answer.status, answer.error["param"]) == (404, "model")
    assert parrot.metrics().num_requests == before, "nothing of it runs"
    assert send(parrot, path, response_format={"type": "text"}).status == 200


def test_what_is_ignored_is_not_built() -> None:
    nested = b"[" * 500 + b"]" * 500
    request = msgspec.json.decode(b'{"prompt":"a","metadata":' + nested + b"}", type=CompletionRequest)
    assert isinstance(request.metadata, msgspec.Raw)  # type: ignore[attr-defined]
    refused = msgspec.json.decode(b'{"prompt":"a","guided_json":' + nested + b"}", type=CompletionRequest)
    with pytest.raises(Problem, match="guided_json is not supported"):
        refused.check()


def test_a_body_of_countless_lists_is_refused(parrot: Server) -> None:
    body = b'{"model":"parrot","prompt":"a","metadata":[' + b",".join([b"[]"] * 300_000) + b"]}"
    refused = parrot.post("/v1/completions", body)
    assert refused.status == 400
    assert "brackets" in refused.error["message"]
