"""Any value, in any place of any request: the answer is never a 5xx, a refusal repeats little of it, and the engine goes on."""

from __future__ import annotations

import http.client
import json
import os
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from nanoengine.serve.server import messages, ollama, protocol, responses
from tests.serve.aio.toys import PATIENCE
from tests.serve.server.running import JSON, Server

NUM_DRAWN = int(os.environ.get("NANOENGINE_NUM_BODIES", "60"))
"""Bodies for a path; a search takes more of them."""

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
USER = {"role": "user", "content": [{"type": "text", "text": "a"}]}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "b", "parameters": SCHEMA}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
CHAT = [
    {"role": "system", "content": "a"},
    USER,
    {"role": "assistant", "content": "b", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "c"},
]
OLLAMA_CALL = {"function": {"name": "f", "arguments": {"a": "b"}}}
OLLAMA = {"model": "demo", "options": {"num_predict": 1, "temperature": 0, "stop": ["x"]}}
DOORS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/completions": (
        protocol.CompletionRequest,
        {"prompt": ["a"], "max_tokens": 1, "stop": ["x"], "logit_bias": {"1": 1}},
    ),
    "/v1/chat/completions": (
        protocol.ChatRequest,
        {
            "messages": CHAT,
            "max_tokens": 1,
            "tools": [FUNCTION],
            "response_format": FORMAT,
        },
    ),
    "/v1/chat/completions#stream": (
        protocol.ChatRequest,
        {
            "messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "a"}]}, USER],
            "max_tokens": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "documents": [{"title": "a"}],
            "chat_template_kwargs": {"a": 1},
        },
    ),
    "/v1/messages": (
        messages.MessagesRequest,
        {
            "max_tokens": 1,
            "system": [{"type": "text", "text": "a"}],
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": "b"}}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a"}]}
                    ],
                },
            ],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "enabled", "budget_tokens": 1},
        },
    ),
    "/v1/messages#format": (
        messages.MessagesRequest,
        {
            "max_tokens": 1,
            "messages": [USER],
            "thinking": {"type": "adaptive"},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
        },
    ),
    "/v1/messages/count_tokens": (
        messages.CountTokensRequest,
        {"messages": [USER], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    ),
    "/v1/responses": (
        responses.ResponsesRequest,
        {
            "max_output_tokens": 1,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
            ],
            "tools": [
                {"type": "function", "name": "f", "parameters": SCHEMA},
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
            ],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
            "reasoning": {"effort": "low"},
        },
    ),
    "/api/chat": (
        ollama.OllamaChatRequest,
        {
            **OLLAMA,
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "tool_calls": [OLLAMA_CALL]},
                {"role": "tool", "tool_name": "f", "content": "c"},
            ],
            "tools": [FUNCTION],
            "format": SCHEMA,
        },
    ),
    "/api/generate": (ollama.OllamaGenerateRequest, {**OLLAMA, "prompt": "a", "system": "b", "format": SCHEMA}),
    "/v1/embeddings": (protocol.EmbeddingRequest, {"input": ["a"]}),
    "/api/embed": (ollama.OllamaEmbedRequest, {"model": "demo", "input": ["a"]}),
    "/tokenize": (protocol.TokenizeRequest, {"messages": CHAT, "tools": [FUNCTION]}),
    "/detokenize": (protocol.DetokenizeRequest, {"tokens": [1]}),
    "/abort_requests": (protocol.AbortRequest, {"request_ids": ["a"]}),
}
HOLE = "the place of the value"
LONG = b"y" * 3000
VALUES = [
    *(b"null", b"true", b"-1", b"0", b"1.5", b"1e999", b"NaN", b"18446744073709551616", b"1" * 5000, b'""', b'"x"'),
    *(b'"\\ud800"', b'"\\u0000"', b'"\xff"', b"[]", b"[null]", b"[[]]", b"[1,2]", b'["x"]', b"{}", b'{"a":1}'),
    *(b'{"type":[],"role":{}}', b'[{"role":1,"content":2}]', b'[{"type":"function","function":1}]'),
    *(
        b"[" * 900 + b"]" * 900,
        b'"%b"' % LONG,
        b'{"%b":1}' % LONG,
        b'["%b"]' % LONG,
        b'{"type":"%b","role":"%b"}' % (LONG, LONG),
    ),
]


def with_hole(value: Any) -> Iterator[Any]:
    """The value, with a hole in each of its places in turn."""
    yield HOLE
    for key, own in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        for changed in with_hole(own):
            kept = value.copy()
            kept[key] = changed
            yield kept


@pytest.mark.parametrize("path", DOORS)
def test_any_value_in_a_body_is_answered(demo: Server, path: str) -> None:
    kind, base = DOORS[path]
    shapes = list(with_hole(base)) + [{**base, name: HOLE} for name in kind.__struct_fields__ if name not in base]
    bodies = [json.dumps(own).encode().replace(json.dumps(HOLE).encode(), value) for own in shapes for value in VALUES]
    path = path.partition("#")[0]
    connection = http.client.HTTPConnection(*demo.address, timeout=PATIENCE)
    wrong, statuses = [], []
    for body in [json.dumps(base).encode(), *random.Random(path).sample(bodies, min(NUM_DRAWN, len(bodies)))]:
        connection.request("POST", path, body, JSON)
        answer = connection.getresponse()
        text = answer.read()
        statuses.append(answer.status)
        repeats = answer.status >= 400 and any(sign * 100 in text for sign in (b"y", b"1"))
        if answer.status >= 500 or b"an error of its own" in text or repeats:
            wrong.append(f"{body[:400]!r}: {answer.status} {text[:80]!r}")
    connection.close()
    assert wrong == []
    assert statuses[0] == 200, "the request without any other value"
    assert demo.complete("a", max_tokens=1).status == 200
