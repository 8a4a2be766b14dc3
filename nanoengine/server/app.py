"""The ASGI application: which path leads to which endpoint, and what becomes of errors."""

from __future__ import annotations

import logging
from functools import partial
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from nanoengine.builder import is_installed
from nanoengine.errors import NanoEngineError
from nanoengine.observability.view import take_view
from nanoengine.server import ollama, operations
from nanoengine.server.chat import chat_completions
from nanoengine.server.completions import completions
from nanoengine.server.errors import Problem, problem_of
from nanoengine.server.fresh import Fresh
from nanoengine.server.http import BoundedHTTP, Connections
from nanoengine.server.infill import infill
from nanoengine.server.messages import count_tokens, messages
from nanoengine.server.middleware import Identify
from nanoengine.server.openapi import openapi
from nanoengine.server.page import FILES, page_routes
from nanoengine.server.response_store import ResponseStore
from nanoengine.server.responses import delete_response, response, response_input_items, responses
from nanoengine.server.serving import Serving
from nanoengine.server.tokens import detokenize, tokenize, tokenizer_info

logger = logging.getLogger("nanoengine.server")

SECONDS_TO_SAY_SO = 2
"""After aborting what runs: for its clients to be told."""

VIEW_SECONDS = 0.1
"""How old the view may be that the page is shown."""

ROUTES = [
    Route("/health", operations.health),
    Route("/ping", operations.health, methods=["GET", "POST"]),
    Route("/load", operations.load),
    Route("/version", operations.version),
    Route("/metrics", operations.metrics),
    Route("/v1/models", operations.models),
    Route("/v1/models/{name:path}", operations.model),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/responses/{response_id}", response),
    Route("/v1/responses/{response_id}/input_items", response_input_items),
    Route("/v1/responses/{response_id}", delete_response, methods=["DELETE"]),
    Route("/infill", infill, methods=["POST"]),
    Route("/api/chat", ollama.chat, methods=["POST"]),
    Route("/api/generate", ollama.generate, methods=["POST"]),
    Route("/api/show", ollama.show, methods=["POST"]),
    Route("/api/tags", ollama.tags),
    Route("/api/ps", ollama.ps),
    Route("/api/version", ollama.version),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info),
    Route("/abort_requests", operations.abort_requests, methods=["POST"]),
    Route("/reset_prefix_cache", operations.reset_prefix_cache, methods=["POST"]),
    Route("/restart_replicas", operations.restart_replicas, methods=["POST"]),
    Route("/openapi.json", openapi),
]


def pooling_routes() -> list[Route]:
    """Embeddings and what is made of them, where they are installed."""
    if not is_installed("pooling"):
        return []
    from nanoengine.server import embeddings, ollama_embeddings

    endpoints = {
        embeddings.embeddings: ("/v1/embeddings",),
        ollama_embeddings.embed: ("/api/embed",),
        ollama_embeddings.embeddings: ("/api/embeddings",),
    }
    return [Route(path, endpoint, methods=["POST"]) for endpoint, paths in endpoints.items() for path in paths]


def adapter_routes() -> list[Route]:
    """Loading and unloading of adapters, where they are installed."""
    if not is_installed("lora"):
        return []
    from nanoengine.server import adapters

    endpoints = {"load": adapters.load_adapter, "unload": adapters.unload_adapter}
    return [Route(f"/v1/{what}_lora_adapter", own, methods=["POST"]) for what, own in endpoints.items()]


OPEN_PATHS = ("/health", "/ping", "/version", "/metrics", "/openapi.json")
"""What balancers, dashboards and those who write clients ask for: no key is needed."""


def make_app(serving: Serving) -> Starlette:
    """The application that serves a model."""
    config = serving.config
    look = getattr(
        serving.metrics, "view", partial(take_view, observer=serving.metrics)
    )  # of replicas, as they told it
    routes = [
        *ROUTES,
        *pooling_routes(),
        *adapter_routes(),
        *(page_routes(Fresh(lambda: serving.engine.call(look), VIEW_SECONDS).get) if config.page else ()),
    ]
    open_paths, origins = (*OPEN_PATHS, *FILES.values()), config.cors_origin
    middleware = [Middleware(Identify, config, open_paths)]
    if origins is not None:  # around all: pages may read why they are refused
        middleware.insert(0, Middleware(CORSMiddleware, origins, allow_methods=["*"], allow_headers=["*"]))
    handlers: dict[Any, Any] = {NanoEngineError: _answer_error, HTTPException: _answer_http_error}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False  # to whatever host the request names
    app.state.serving = serving
    app.state.responses = ResponseStore()
    return app


def http_settings(serving: Serving) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        make_app(serving),
        http=partial(BoundedHTTP, Connections(serving.config.max_connections)),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # ours says more
        server_header=False,
        proxy_headers=serving.config.forwarded_allow_ips is not None,
        forwarded_allow_ips=list(serving.config.forwarded_allow_ips or ()),
        timeout_graceful_shutdown=SECONDS_TO_SAY_SO,
        **serving.config.tls,
    )


async def _answer_error(http: HTTPRequest, error: NanoEngineError) -> Response:
    problem = problem_of(error)
    if problem.status >= 500 and not isinstance(error, Problem):
        logger.error("%s: %s", http.url.path, error, exc_info=error)
    return problem.response(http.scope)


async def _answer_http_error(http: HTTPRequest, error: HTTPException) -> Response:
    """Of Starlette's own: no such path, no such method."""
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        problem = Problem(405, f"{http.url.path[:80]} does not take {http.method}", headers=error.headers)
    elif error.status_code == HTTPStatus.NOT_FOUND:
        problem = Problem(404, f"there is no {http.url.path[:80]} here; /openapi.json lists what there is")
    else:
        problem = Problem(error.status_code, error.detail, headers=error.headers)
    return problem.response(http.scope)
