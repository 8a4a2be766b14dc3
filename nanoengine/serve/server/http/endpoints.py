"""ENDPOINTS: the table of all endpoints. Routes, /openapi.json and the rules of access are made from it."""

from __future__ import annotations

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
    """This description."""
    return json_response(document(ENDPOINTS))


ENDPOINTS: tuple[Endpoint, ...] = (
    # OpenAI's
    Endpoint("POST", "/v1/completions", completions, CompletionRequest, EVENTS),
    Endpoint("POST", "/v1/chat/completions", chat_completions, ChatRequest, EVENTS),
    Endpoint("POST", "/v1/responses", responses, ResponsesRequest, EVENTS),
    Endpoint("GET", "/v1/models", operations.models),
    Endpoint("GET", "/v1/models/{name:path}", operations.model),
    # Anthropic's
    Endpoint("POST", "/v1/messages", messages, MessagesRequest, EVENTS),
    Endpoint("POST", "/v1/messages/count_tokens", count_tokens, CountTokensRequest),
    # llama.cpp's
    Endpoint("POST", "/completion", completion, LlamaRequest, EVENTS),
    Endpoint("POST", "/infill", infill, InfillRequest, EVENTS),
    Endpoint("POST", "/apply-template", tokens.apply_template, ChatRequest),
    Endpoint("GET", "/props", props),
    # Ollama's
    Endpoint("POST", "/api/chat", ollama.chat, ollama.OllamaChatRequest, LINES),
    Endpoint("POST", "/api/generate", ollama.generate, ollama.OllamaGenerateRequest, LINES),
    Endpoint("POST", "/api/show", ollama.show, ollama.OllamaShowRequest),
    Endpoint("GET", "/api/tags", ollama.tags),
    Endpoint("GET", "/api/ps", ollama.ps),
    Endpoint("HEAD", "/", operations.health, access=OPEN),
    Endpoint("GET", "/api/version", operations.version),
    # vLLM's
    Endpoint("POST", "/tokenize", tokens.tokenize, TokenizeRequest),
    Endpoint("POST", "/detokenize", tokens.detokenize, DetokenizeRequest),
    Endpoint("GET", "/tokenizer_info", tokens.tokenizer_info),
    Endpoint("GET", "/load", operations.load),
    Endpoint("POST", "/abort_requests", operations.abort_requests, AbortRequest),
    Endpoint("POST", "/reset_prefix_cache", operations.reset_prefix_cache, access=ADMIN),
    Endpoint("POST", "/restart_replicas", operations.restart_replicas, access=ADMIN),
    # For load balancers and dashboards
    Endpoint("GET", "/health", operations.health, access=OPEN, is_polled=True),
    Endpoint("GET", "/ping", operations.health, access=OPEN, is_polled=True),
    Endpoint("POST", "/ping", operations.health, access=OPEN, is_polled=True),
    Endpoint("GET", "/metrics", operations.metrics, access=OPEN, is_polled=True),
    Endpoint("GET", "/version", operations.version, access=OPEN),
    Endpoint("GET", "/openapi.json", openapi, access=OPEN),
)

if is_installed("pooling"):
    from nanoengine.serve.server.apis.ollama.embeddings import embed
    from nanoengine.serve.server.apis.openai.embeddings import embeddings

    ENDPOINTS += (
        Endpoint("POST", "/v1/embeddings", embeddings, EmbeddingRequest),
        Endpoint("POST", "/api/embed", embed, ollama.OllamaEmbedRequest),
    )

if is_installed("lora"):
    from nanoengine.serve.server.apis.adapters import load_adapter, unload_adapter

    ENDPOINTS += (
        Endpoint("POST", "/v1/load_lora_adapter", load_adapter, LoadAdapterRequest, access=ONLY_ADMIN),
        Endpoint("POST", "/v1/unload_lora_adapter", unload_adapter, UnloadAdapterRequest, access=ONLY_ADMIN),
    )

VIEW = Endpoint("GET", "/view", show_view, access=ADMIN, is_polled=True)
"""The endpoint of the page; it is left out without it."""
