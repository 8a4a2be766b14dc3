"""What clients are told of exceptions."""

from __future__ import annotations

import pytest

from nanoengine.errors import (
    EngineDead,
    InvalidPrompt,
    InvalidRequest,
    InvalidSamplingParams,
    NotFiniteLogits,
    NoTokenLeft,
    StepFailed,
)
from nanoengine.serve.server.bodies.chat_encoder import check_turns
from nanoengine.serve.server.errors import APIError, api_error_of
from tests.serve.server.conftest import MakeServer
from tests.serve.server.interfaces import CHAT, INTERFACES, MESSAGES, RESPONSES
from tests.serve.server.running import Server

FAILED = StepFailed("the request failed: allowed_token_ids leave nothing", [])
FAILED.__cause__ = NoTokenLeft("allowed_token_ids", " leave nothing")  # by what the request forbids: its own fault


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (InvalidSamplingParams("top_p", " is 2: it must be at most 1"), 400, "top_p"),
        (InvalidPrompt("the prompt is empty"), 400, "prompt"),
        (InvalidSamplingParams("structured_outputs.json", " is no JSON"), 400, "structured_outputs"),
        (InvalidSamplingParams("top_p is a word that may begin any message"), 400, None),
        (InvalidPrompt("messages[0]", " must have a role"), 400, "messages"),
        (InvalidRequest("there is no room for the adapter"), 400, None),
        (InvalidRequest("no adapter 'a' is loaded"), 400, None),
        (EngineDead("the engine died"), 503, None),
        (NotFiniteLogits("NaN"), 500, None),
        (ZeroDivisionError("secret"), 500, None),
        (FAILED, 400, "allowed_token_ids"),
        (StepFailed("the request failed: NaN", []), 500, None),
    ],
)
def test_whose_fault_it_is_says_the_status(error: Exception, status: int, param: str | None) -> None:
    problem = api_error_of(error)
    assert (problem.status, problem.param) == (status, param)
    assert "secret" not in problem.message


TURN = {"role": "user", "content": "a"}
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


def test_roles_that_the_template_names_and_results_of_calls_are_taken(hermes: Server) -> None:
    result = {"role": "tool", "content": "x"}
    for turns in ([CALLED, result | {"tool_call_id": "1"}], [CALLED, result], [{"role": "function", "content": "x"}]):
        body = {"messages": [TURN, *turns], "max_tokens": 1}
        assert hermes.post("/v1/chat/completions", body).status == 200
    check_turns([{"role": "ipython"}], "{% if message.role == 'ipython' %}", "messages")
    with pytest.raises(APIError, match="role is 'ipython'"):
        check_turns([{"role": "ipython"}], "{{ message.role }}", "messages")


@pytest.mark.parametrize("limits", [{}, {"max_text_chars": 500}], ids=str)
def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(
    make_server: MakeServer, limits: dict[str, int]
) -> None:
    """OpenAI's and Anthropic's, by which clients know that a conversation must be made shorter; also before it is split."""
    server = make_server(**limits)
    asked = [(own.path, own.body([("user", "a" * 1100)], model="parrot")) for own in INTERFACES]
    asked += [("/v1/completions", {"prompt": "a" * 1100}), ("/api/generate", {"model": "parrot", "prompt": "a" * 1100})]
    if not limits:
        asked += [("/v1/completions", {"prompt": [7] * 1024}), (CHAT.path, {"messages": [TURN] * 1100})]
    for path, body in asked:
        answer = server.post(path, body)
        error = answer.json["error"]
        message = error if isinstance(error, str) else error["message"]
        assert (answer.status, "prompt is too long" in message) == (400, True), (path, message)
        assert "this model's maximum context length is 1024 tokens" in message
        assert all(name in message for name in limits)
        if path == MESSAGES.path:
            assert error["type"] == "invalid_request_error"
        elif path.startswith("/v1/"):
            assert (error["type"], error["code"]) == ("BadRequestError", "context_length_exceeded")
            assert error["param"] == {CHAT.path: "messages", RESPONSES.path: "input"}.get(path, "prompt")
        if limits:
            assert message.partition(" ")[0] in body
