"""A body for every path that takes one, with as many fields as may stand side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from nanoengine.serve.server.apis import anthropic as messages
from nanoengine.serve.server.apis import llama_cpp
from nanoengine.serve.server.apis.ollama import chat as ollama
from nanoengine.serve.server.apis.openai import responses
from nanoengine.serve.server.bodies import protocol
from tests.outside import fields_in
from tests.serve.server.interface import Call, Result
from tests.serve.server.interfaces import CHAT, MESSAGES, RESPONSES

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


def positions(kind: type[msgspec.Struct], body: Any) -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    """A body, each field in it at any depth, and each field that it may have: its name, what is there, and a function that
    returns a body with another value there."""
    yield "", body, lambda value: value
    yield from fields_in(body)
    for name in kind.__struct_fields__:
        if name not in body:
            yield name, None, lambda value, name=name: {**body, name: value}
