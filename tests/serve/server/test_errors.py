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
from nanoengine.serve.server.errors import Problem, problem_of
from nanoengine.serve.server.text import check_turns
from tests.serve.server.conftest import MakeServer
from tests.serve.server.running import Server

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


TURN = {"role": "user", "content": "a"}
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", {"messages": [TURN, {"role": "wizard", "content": "x"}]}, "messages[1]: role is 'wizard'"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0]: role is 'wizard'"),
        ("/api/chat", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0]: role is 'wizard'"),
        ("/v1/responses", {"input": [{"role": "wizard", "content": "x"}]}, "input[0]: role is 'wizard'"),
        ("/v1/messages", {"messages": [{"role": "wizard", "content": "x"}], "max_tokens": 1}, "messages[0]: role is 'wizard'"),
        *(
            ("/v1/chat/completions", {"messages": [TURN, *before, {"role": "tool", "tool_call_id": "2", "content": "x"}]}, "'2'")
            for before in ([], [CALLED])
        ),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "2", "output": "x"}]}, "input: a result"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "2"}]}], "max_tokens": 1},
            "messages: a result of a tool (tool_call_id '2') answers no call",
        ),
        ("/api/chat", {"messages": [TURN, {"role": "tool", "tool_name": "f", "content": "x"}]}, "answers no call"),
    ],
    ids=str,
)  # fmt: skip
def test_nobodys_message_and_a_result_without_its_call_are_refused(
    parrot: Server, path: str, body: dict[str, Any], words: str
) -> None:
    answer = parrot.post(path, {"model": "parrot", **body})
    assert answer.status == 400
    error = answer.json["error"]
    assert words in (error if isinstance(error, str) else error["message"])


def test_roles_that_the_template_names_and_results_of_calls_are_taken(hermes: Server) -> None:
    result = {"role": "tool", "content": "x"}
    for turns in ([CALLED, result | {"tool_call_id": "1"}], [CALLED, result], [{"role": "function", "content": "x"}]):
        body = {"messages": [TURN, *turns], "max_tokens": 1}
        assert hermes.post("/v1/chat/completions", body).status == 200
    check_turns([{"role": "ipython"}], "{% if message.role == 'ipython' %}", "messages")
    with pytest.raises(Problem, match="role is 'ipython'"):
        check_turns([{"role": "ipython"}], "{{ message.role }}", "messages")


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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * 900}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 900}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": "a" * 900}]}),
    ],
)
def test_so_is_one_that_is_too_long_to_be_split(make_server: MakeServer, path: str, body: dict[str, Any]) -> None:
    error = make_server(max_text_chars=500).post(path, body).error
    assert (error["type"], error["code"]) == ("BadRequestError", "context_length_exceeded")
    assert "prompt is too long" in error["message"]
    assert "this model's maximum context length is 1024 tokens" in error["message"]
    assert "max_text_chars" in error["message"]
