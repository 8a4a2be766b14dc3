"""Every field of a request is taken, tolerated or refused by its name: none is dropped in silence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nanoengine.errors import shown
from nanoengine.serve.server.bodies.fields import IGNORED, MAX_IGNORED_NAMES, NEUTRAL, Ignored, without_unknown
from nanoengine.serve.server.bodies.protocol import ChatRequest, CompletionRequest, Generation
from nanoengine.serve.server.errors import APIError
from tests.serve.server.running import Answer, Server

PATHS: dict[str, type[Generation]] = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}


def send(server: Server, path: str, **fields: Any) -> Answer:
    own = {"prompt": "abc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "abc"}]}
    return server.post(path, own | {"max_tokens": 2} | fields)


def names_of(path: str) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(PATHS[path])}


@pytest.mark.parametrize("path", PATHS)
def test_what_cannot_be_done_is_refused_by_its_name(parrot: Server, path: str) -> None:
    for name in sorted({*NEUTRAL, "guided_json", "prompt_embeds", "audio"} - names_of(path)):
        neutral = NEUTRAL.get(name, ())
        for value in (2.5, "x", [1], {"a": 1}, *neutral, None):
            answer = send(parrot, path, **{name: value})
            if value is None or value in neutral:
                assert answer.status == 200, (name, value)
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


USER = [{"role": "user", "content": "abc"}]
DOORS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/responses": {"input": "abc", "max_output_tokens": 2},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": USER},
    "/api/chat": {"model": "parrot", "messages": USER},
    "/api/generate": {"model": "parrot", "prompt": "abc"},
    "/api/show": {"model": "parrot"},
    "/tokenize": {"prompt": "abc"},
}
OF_TABLES = {"/v1/responses": "reasoning", "/v1/messages": "output_config", "/api/chat": "options"}
LENIENT = ("/api/chat", "/api/generate", "/api/show")


@pytest.mark.parametrize("path", DOORS)
def test_what_nobody_knows_is_taken_where_it_asks_for_nothing(parrot: Server, path: str) -> None:
    """So that newer clients are served; the rule is the same for every interface, and inside of its tables."""
    for place in (None, OF_TABLES.get(path)):
        for value in (None, "", [], {}, "auto", "default", False, 0, "x", [1], {"a": 1}):
            field = {"newer": value} if place is None else {place: {"newer": value}}
            answer = parrot.post(path, DOORS[path] | field)
            is_asked = path not in LENIENT and value in (False, 0, "x", [1], {"a": 1}) and value not in ([], {})
            assert answer.status == (400 if is_asked else 200), (place, value, answer.body)
            assert not is_asked or b"newer is not supported: leave it out" in answer.body


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
    "/v1/completions": {"prompt": NO_PROMPTS, "max_tokens": [1025], "best_of": [0, -1], "logprobs": [-1]},
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
    with pytest.raises(APIError, match="guided_json is not supported"):
        without_unknown(b'{"prompt":"a","guided_json":' + nested + b"}", CompletionRequest, Ignored())


def test_ollamas_rule_ignores_and_logs_each_name_once(parrot: Server, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        fields = {"new\nline": 1, "x" * 5000: 2, "options": {"other": [3]}}
        assert parrot.post("/api/chat", DOORS["/api/chat"] | fields).status == 200
    assert [record.getMessage().split()[2] for record in caplog.records if "is ignored" in record.getMessage()] == [
        repr("new\nline"),
        shown("x" * 5000),
        "'options.other'",
    ]
    many = {f"name-{number}": 1 for number in range(2 * MAX_IGNORED_NAMES)}
    assert parrot.post("/api/generate", DOORS["/api/generate"] | many).status == 200
    assert sum("is ignored" in record.getMessage() for record in caplog.records) <= MAX_IGNORED_NAMES


def test_a_body_of_countless_lists_is_refused(parrot: Server) -> None:
    body = b'{"model":"parrot","prompt":"a","metadata":[' + b",".join([b"[]"] * 300_000) + b"]}"
    refused = parrot.post("/v1/completions", body)
    assert refused.status == 400
    assert "brackets" in refused.error["message"]
