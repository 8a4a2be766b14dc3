"""Any value, in any place of any request: the answer is never a 5xx, a refusal repeats little of it, and the engine goes on."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from nanoengine.serve.server.apis import anthropic as messages
from nanoengine.serve.server.apis import llama_cpp
from nanoengine.serve.server.apis.ollama import chat as ollama
from nanoengine.serve.server.apis.openai import responses
from nanoengine.serve.server.bodies import protocol
from tests.serve.aio.toys import PATIENCE
from tests.serve.server.interface import Call, Result
from tests.serve.server.interfaces import CHAT, MESSAGES, RESPONSES
from tests.serve.server.running import JSON, Server

NUM_DRAWN = int(os.environ.get("NANOENGINE_NUM_BODIES", "60"))
"""Bodies for a path; a search takes more of them."""

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
USER = {"role": "user", "content": [{"type": "text", "text": "a"}]}
TURNS: list[Any] = [("user", "a", "b"), ("assistant", "c", Call("now", {"a": "b"})), ("tool", Result("now", "d"))]
WITH_SYSTEM = [("system", "a"), *TURNS]
ALL: dict[str, Any] = {"tools": ["now"], "max_tokens": 1, "model": "demo"}
ASKED = CHAT.body(WITH_SYSTEM, schema=SCHEMA, **ALL)
FUNCTION, CALL = ASKED["tools"][0], ASKED["messages"][2]["tool_calls"][0]
NAMESPACE = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]}
OF_RESPONSES = RESPONSES.body(TURNS, schema=SCHEMA, **ALL)
OF_RESPONSES |= {"input": [*OF_RESPONSES["input"], THOUGHT], "tools": [*OF_RESPONSES["tools"], NAMESPACE]}
OF_OLLAMA: dict[str, Any] = {"model": "demo", "options": {"num_predict": 1, "temperature": 0, "stop": ["x"]}}
OLLAMA_CALL = {"function": {"name": "f", "arguments": {"a": "b"}}}
OLLAMA_TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [OLLAMA_CALL]},
    {"role": "tool", "tool_name": "f", "content": "c"},
]
OLLAMA_TOOL = {"type": "function", "function": {"name": "f", "description": "b", "parameters": SCHEMA}}
DOORS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/completions": (
        protocol.CompletionRequest,
        {"prompt": ["a"], "max_tokens": 1, "stop": ["x"], "logit_bias": {"1": 1}},
    ),
    "/v1/chat/completions": (protocol.ChatRequest, ASKED),
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
        MESSAGES.body(WITH_SYSTEM, choice="now", thinking={"type": "enabled", "budget_tokens": 1}, **ALL),
    ),
    "/v1/messages#format": (
        messages.MessagesRequest,
        MESSAGES.body([("user", "a")], schema=SCHEMA, max_tokens=1, thinking={"type": "adaptive"}),
    ),
    "/v1/messages/count_tokens": (
        messages.CountTokensRequest,
        {"messages": [USER], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    ),
    "/v1/responses": (
        responses.ResponsesRequest,
        OF_RESPONSES | {"tool_choice": ALLOWED, "reasoning": {"effort": "low"}},
    ),
    "/api/chat": (
        ollama.OllamaChatRequest,
        {**OF_OLLAMA, "messages": OLLAMA_TURNS, "tools": [OLLAMA_TOOL], "format": SCHEMA},
    ),
    "/api/generate": (ollama.OllamaGenerateRequest, {**OF_OLLAMA, "prompt": "a", "system": "b", "format": SCHEMA}),
    "/v1/embeddings": (protocol.EmbeddingRequest, {"input": ["a"]}),
    "/api/embed": (ollama.OllamaEmbedRequest, {"model": "demo", "input": ["a"]}),
    "/completion": (llama_cpp.LlamaRequest, {"prompt": "a", "n_predict": 1, "json_schema": SCHEMA, "stop": ["x"]}),
    "/apply-template": (protocol.ChatRequest, {"messages": [USER]}),
    "/tokenize": (protocol.TokenizeRequest, {"messages": ASKED["messages"], "tools": [FUNCTION]}),
    "/detokenize": (protocol.DetokenizeRequest, {"tokens": [1]}),
    "/abort_requests": (protocol.AbortRequest, {"request_ids": ["a"]}),
}
HOLE = "the place of the value"
LONG = b"y" * 3000
NO_LIMIT = re.compile(rb'"(max_tokens|max_output_tokens|num_predict|n_predict)": (null|18446744073709551616)')
"""With it an answer is as long as the model can make it."""

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
    drawn = random.Random(path).sample(bodies, min(NUM_DRAWN, len(bodies)))
    for body in [json.dumps(base).encode(), *(own for own in drawn if not NO_LIMIT.search(own))]:
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
    demo.check_idle()


def test_a_byte_order_mark_in_front_of_a_body_is_none_of_it(parrot: Server) -> None:
    for path in ("/v1/completions", "/tokenize"):
        answer = parrot.post(path, BOM_UTF8 + b'{"prompt": "abc"}')
        assert answer.status == 200, answer.body
