"""GET /openapi.json: what the server takes and gives, made from the same types that requests are read with."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

import nanoengine
from nanoengine.builder import is_installed
from nanoengine.server.answers import json_response
from nanoengine.server.infill import InfillRequest
from nanoengine.server.messages import CountTokensRequest, MessagesRequest
from nanoengine.server.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from nanoengine.server.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from nanoengine.server.responses import ResponsesRequest

POSTS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/completions": (CompletionRequest, "Complete prompts"),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation"),
    "/v1/messages": (MessagesRequest, "Answer a conversation, as Anthropic's clients have it"),
    "/v1/messages/count_tokens": (CountTokensRequest, "How many tokens a conversation has"),
    "/v1/responses": (ResponsesRequest, "Answer a conversation, as OpenAI's newer clients have it"),
    "/infill": (InfillRequest, "What stands between two texts, as llama.cpp's clients have it"),
    "/api/chat": (OllamaChatRequest, "Answer a conversation, as Ollama's clients have it"),
    "/api/generate": (OllamaGenerateRequest, "Answer a prompt, likewise"),
    "/api/show": (OllamaShowRequest, "What the model can do"),
    "/tokenize": (TokenizeRequest, "Token ids of a prompt or of messages"),
    "/detokenize": (DetokenizeRequest, "Text of token ids"),
    "/abort_requests": (AbortRequest, "End requests by the ids of their answers, or all"),
}

OF_POOLING: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/embeddings": (EmbeddingRequest, "Vectors of texts"),
    "/api/embed": (OllamaEmbedRequest, "Vectors of texts, as Ollama's clients have it"),
    "/api/embeddings": (OllamaEmbeddingsRequest, "The vector of one text, likewise"),
}
if is_installed("pooling"):
    POSTS |= OF_POOLING
if is_installed("lora"):
    POSTS |= {
        "/v1/load_lora_adapter": (LoadAdapterRequest, "Load an adapter, which is then a model by its name"),
        "/v1/unload_lora_adapter": (UnloadAdapterRequest, "Unload an adapter"),
    }

STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")

GETS = {
    "/health": "200 while requests are served",
    "/ping": "The same",
    "/load": "How many calls are being answered",
    "/version": "Of the server",
    "/metrics": "Counters, for Prometheus",
    "/v1/models": "The model under each of its names, and its adapters",
    "/api/tags": "The model under each of its names, as Ollama's clients have it",
    "/api/ps": "The same",
    "/api/version": "Of the server",
    "/tokenizer_info": "Special tokens and the chat template",
}

FIELDS: dict[str, dict[str, Any]] = {
    "message": {"type": "string"},
    "type": {"type": "string"},
    "param": {"type": ["string", "null"]},
    "code": {"type": ["integer", "string"]},
}
"""Of an error."""

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": list(FIELDS), "properties": FIELDS}},
}


async def openapi(http: HTTPRequest) -> Response:  # noqa: ARG001 - the signature of endpoints
    return json_response(document())


@cache
def document() -> dict[str, Any]:
    types = [kind for kind, _ in POSTS.values()]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {path: {"get": {"summary": text, "responses": _responses()}} for path, text in GETS.items()}
    for (path, (_, text)), schema in zip(POSTS.items(), schemas, strict=True):
        paths[path] = {
            "post": {
                "summary": text,
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": _responses(streams=path in STREAMS),
            }
        }
    paths["/restart_replicas"] = {"post": {"summary": "Start all replicas anew", "responses": _responses()}}
    paths["/reset_prefix_cache"] = {"post": {"summary": "Forget all cached prefixes", "responses": _responses()}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "nanoengine", "version": nanoengine.__version__},
        "paths": paths,
        "components": {"schemas": {**components, "Error": ERROR}},
    }


def _responses(streams: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {}}
    if streams:
        content["text/event-stream"] = {}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "200": {"description": "done", "content": content},
        "default": {"description": "refused, or failed", "content": error},
    }
