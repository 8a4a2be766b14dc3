"""What clients are told of exceptions."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.errors import (
    EngineDead,
    InvalidPrompt,
    InvalidSamplingParams,
    NotFiniteLogits,
    NoTokenLeft,
    StepFailed,
)
from nanoengine.server.errors import problem_of
from tests.server.running import Server

FAILED = StepFailed("the request failed: allowed_token_ids leave nothing", [])
FAILED.__cause__ = NoTokenLeft("allowed_token_ids leave nothing")  # by what the request forbids: its own fault


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (InvalidSamplingParams("top_p is 2: it must be at most 1"), 400, "top_p"),
        (InvalidPrompt("the prompt is empty"), 400, "prompt"),
        (InvalidPrompt("a chat message must have a role"), 400, None),
        (EngineDead("the engine died"), 503, None),
        (NotFiniteLogits("NaN"), 500, None),
        (ZeroDivisionError("secret"), 500, None),
        (FAILED, 400, "allowed_token_ids"),
        (StepFailed("the request failed: NaN", []), 500, None),
    ],
)
def test_whose_fault_it_is_says_the_status(error: Exception, status: int, param: str | None) -> None:
    problem = problem_of(error)
    assert (problem.status, problem.param) == (status, param)
    assert "secret" not in problem.message


TOO_LONG = "a" * 1100


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TOO_LONG}),
        ("/v1/completions", {"prompt": [7] * 1024}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 1100}),
        ("/v1/responses", {"input": TOO_LONG}),
        ("/v1/messages", {"messages": [{"role": "user", "content": TOO_LONG}], "max_tokens": 5}),
        ("/api/generate", {"model": "parrot", "prompt": TOO_LONG}),
    ],
)
def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(
    parrot: Server, path: str, body: dict[str, Any]
) -> None:
    """OpenAI's and Anthropic's, by which clients know that a conversation must be made shorter."""
    answer = parrot.post(path, body)
    assert answer.status == 400
    error = answer.json["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "prompt is too long: this model's maximum context length is 1024 tokens" in message
    if path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        assert error["code"] == "context_length_exceeded"
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error"
