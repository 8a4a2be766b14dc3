"""ENDPOINTS: the table of all endpoints. Routes, /openapi.json and the rules of access are made from it."""

from __future__ import annotations

from functools import cache
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.builder import is_installed
from nanoengine.serve.server.apis import operations, tokens
from nanoengine.serve.server.apis.anthropic import CountTokensRequest, MessagesRequest, count_tokens, messages
from nanoengine.serve.server.apis.json_response import json_response
from nanoengine.serve.server.apis.llama_cpp import InfillRequest, LlamaRequest, completion, infill, props
from nanoengine.serve.server.apis.ollama import chat as ollama
from nanoengine.serve.server.apis.openai.chat import chat_completions
from nanoengine.serve.server.apis.openai.completions import completions
from nanoengine.serve.server.apis.openai.responses import ResponsesRequest, responses
from nanoengine.serve.server.bodies.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from nanoengine.serve.server.http.endpoint import EVENTS, LINES, Access, Endpoint
from nanoengine.serve.server.http.openapi import document
from nanoengine.serve.server.http.page import show_view
from nanoengine.serve.server.served_model import ServedModel

OPEN, ADMIN, ONLY_ADMIN = Access.OPEN, Access.ADMIN, Access.ONLY_ADMIN


async def openapi(_: HTTPRequest, __: ServedModel) -> Response:
    return json_response(_document())


@cache
def _document() -> dict[str, Any]:
    return document(ENDPOINTS)


ENDPOINTS: tuple[Endpoint, ...] = (
    # OpenAI's
    Endpoint("POST", "/v1/completions", completions, "Complete prompts", CompletionRequest, EVENTS),
    Endpoint("POST", "/v1/chat/completions", chat_completions, "Answer a conversation", ChatRequest, EVENTS),
    Endpoint(
        "POST", "/v1/responses", responses, "Answer a conversation (OpenAI's newer API)", ResponsesRequest, EVENTS
    ),
    Endpoint("GET", "/v1/models", operations.models, "The model under each of its names, and its adapters"),
    Endpoint("GET", "/v1/models/{name:path}", operations.model, "The model or adapter of a name"),
    # Anthropic's
    Endpoint("POST", "/v1/messages", messages, "Answer a conversation (Anthropic's API)", MessagesRequest, EVENTS),
    Endpoint(
        "POST", "/v1/messages/count_tokens", count_tokens, "Count the tokens of a conversation", CountTokensRequest
    ),
    # llama.cpp's
    Endpoint("POST", "/completion", completion, "Go on with a text (llama.cpp's API)", LlamaRequest, EVENTS),
    Endpoint("POST", "/infill", infill, "The text between a prefix and a suffix", InfillRequest, EVENTS),
    Endpoint("POST", "/apply-template", tokens.apply_template, "A conversation in the chat template", ChatRequest),
    Endpoint("GET", "/props", props, "The context and the chat template (llama.cpp's API)"),
    # Ollama's
    Endpoint("POST", "/api/chat", ollama.chat, "Answer a conversation (Ollama's API)", ollama.OllamaChatRequest, LINES),
    Endpoint(
        "POST", "/api/generate", ollama.generate, "Answer a prompt (Ollama's API)", ollama.OllamaGenerateRequest, LINES
    ),
    Endpoint("POST", "/api/show", ollama.show, "The model's abilities", ollama.OllamaShowRequest),
    Endpoint("GET", "/api/tags", ollama.tags, "The model under each of its names, and its adapters"),
    Endpoint("GET", "/api/ps", ollama.ps, "The models in memory, which are all of them"),
    Endpoint("HEAD", "/", operations.health, "200 while requests are served", access=OPEN),
    Endpoint("GET", "/api/version", operations.version, "The version of the server"),
    # vLLM's
    Endpoint("POST", "/tokenize", tokens.tokenize, "Token ids of a prompt or of messages", TokenizeRequest),
    Endpoint("POST", "/detokenize", tokens.detokenize, "The text of token ids", DetokenizeRequest),
    Endpoint("GET", "/tokenizer_info", tokens.tokenizer_info, "Special tokens and the chat template"),
    Endpoint("GET", "/load", operations.load, "The number of requests that are being answered"),
    Endpoint("POST", "/abort_requests", operations.abort_requests, "End requests by their ids, or all", AbortRequest),
    Endpoint("POST", "/reset_prefix_cache", operations.reset_prefix_cache, "Forget all cached prefixes", access=ADMIN),
    Endpoint("POST", "/restart_replicas", operations.restart_replicas, "Restart all replicas one by one", access=ADMIN),
    # For load balancers and dashboards
    Endpoint("GET", "/health", operations.health, "200 while requests are served", access=OPEN, is_polled=True),
    Endpoint("GET", "/ping", operations.health, "The same as /health", access=OPEN, is_polled=True),
    Endpoint("POST", "/ping", operations.health, "The same as /health", access=OPEN, is_polled=True),
    Endpoint("GET", "/metrics", operations.metrics, "Counters for Prometheus", access=OPEN, is_polled=True),
    Endpoint("GET", "/version", operations.version, "The version of the server", access=OPEN),
    Endpoint("GET", "/openapi.json", openapi, "This description", access=OPEN),
)

if is_installed("pooling"):
    from nanoengine.serve.server.apis.ollama.embeddings import embed
    from nanoengine.serve.server.apis.openai.embeddings import embeddings

    ENDPOINTS += (
        Endpoint("POST", "/v1/embeddings", embeddings, "Vectors of texts", EmbeddingRequest),
        Endpoint("POST", "/api/embed", embed, "Vectors of texts (Ollama's API)", ollama.OllamaEmbedRequest),
    )

if is_installed("lora"):
    from nanoengine.serve.server.apis.adapters import load_adapter, unload_adapter

    ENDPOINTS += (
        Endpoint(
            "POST",
            "/v1/load_lora_adapter",
            load_adapter,
            "Load an adapter, as a model",
            LoadAdapterRequest,
            access=ONLY_ADMIN,
        ),
        Endpoint(
            "POST",
            "/v1/unload_lora_adapter",
            unload_adapter,
            "Unload an adapter",
            UnloadAdapterRequest,
            access=ONLY_ADMIN,
        ),
    )

VIEW = Endpoint("GET", "/view", show_view, "The state of the engine, for the page", access=ADMIN, is_polled=True)
"""The endpoint of the page; it is left out without it."""
