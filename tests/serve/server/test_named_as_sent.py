"""What is wrong with a schema is said of the field that the client has sent, in every interface."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.server.running import Server

BAD = {"type": "object", "properties": {"a": {"type": "string", "format": "colour"}}}
OF_OPENAI = {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}}
FORMAT = {"type": "json_schema", "name": "x", "schema": BAD}
ASKED = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "model": "demo"}
OLLAMA = {"messages": ASKED["messages"], "model": "demo"}
FINE = {"type": "function", "function": {"name": "fine", "parameters": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": BAD, "strict": True}}
FLAT = {"type": "function", "name": "f", "parameters": BAD}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {**ASKED, "response_format": OF_OPENAI}, "response_format"),
        ("/v1/completions", {"prompt": "x", "response_format": OF_OPENAI, "stream": True}, "response_format"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": BAD}}, "structured_outputs.json"),
        ("/v1/completions", {"prompt": "x", "json_schema": BAD}, "json_schema"),
        ("/v1/chat/completions", {**ASKED, "tools": [FINE, TOOL]}, "tools[1].function.parameters"),
        ("/v1/chat/completions", {**ASKED, "tools": [FLAT], "tool_choice": "required"}, "tools[0].parameters"),
        ("/api/chat", {**OLLAMA, "format": BAD}, "format"),
        ("/api/generate", {"model": "demo", "prompt": "x", "format": BAD}, "format"),
        ("/api/chat", {**OLLAMA, "tools": [TOOL]}, "tools[0].function.parameters"),
        ("/v1/messages", {**ASKED, "output_format": FORMAT}, "output_format"),
        ("/v1/messages", {**ASKED, "output_config": {"format": FORMAT}}, "output_config.format"),
        (
            "/v1/messages",
            {**ASKED, "tools": [{"name": "f", "input_schema": BAD}], "tool_choice": {"type": "any"}},
            "tools[0].input_schema",
        ),
        ("/v1/responses", {"input": "x", "text": {"format": FORMAT}}, "text.format"),
        (
            "/v1/responses",
            {"input": "x", "tools": [{"type": "web_search"}, FLAT], "tool_choice": "required"},
            "tools[1].parameters",
        ),
        (
            "/v1/responses",
            {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [FLAT]}], "tool_choice": "required"},
            "tools[0].tools[0].parameters",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_names_what_the_client_has_sent(demo: Server, path: str, body: dict[str, Any], field: str) -> None:
    answer = demo.post(path, body)
    assert answer.status == 400, answer.body
    error = answer.json["error"]
    assert (error if isinstance(error, str) else error["message"]) == f"{field}: Unknown format: colour"
