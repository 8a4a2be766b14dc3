"""The ASGI application: routes of all endpoints, the middleware around them, and the answers to errors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.errors import NanoEngineError
from nanoengine.serve.server.admission.quota import Quota
from nanoengine.serve.server.admission.work_share import WorkShare
from nanoengine.serve.server.config import ServerConfig
from nanoengine.serve.server.errors import APIError, api_error_of
from nanoengine.serve.server.http.connections import CountedHTTP, CountedTLS
from nanoengine.serve.server.http.endpoint import Endpoint
from nanoengine.serve.server.http.endpoints import ENDPOINTS, VIEW
from nanoengine.serve.server.http.middleware import ClientMiddleware
from nanoengine.serve.server.http.page import FILES, file_route
from nanoengine.serve.server.jobs import LAST_EVENT_SECONDS

logger = logging.getLogger("nanoengine.serve.server")


class ServedApplication(Protocol):
    """The state behind an application: one model, or several."""

    config: ServerConfig
    work_share: WorkShare


def make_app(serving: ServedApplication, endpoints: Sequence[Endpoint] = (*ENDPOINTS, VIEW)) -> Starlette:
    """The application; VIEW is left out without the page."""
    config = serving.config
    endpoints = [one for one in endpoints if config.page or one.path != VIEW.path]
    files = sorted(FILES) if config.page else []
    routes = [*(each.route(serving) for each in endpoints), *map(file_route, files)]
    middleware, origins = [Middleware(ClientMiddleware, config, endpoints, serving.work_share)], config.cors_origin
    if origins is not None:  # around all: pages may read why they are refused
        middleware.insert(0, Middleware(CORSMiddleware, origins, allow_methods=["*"], allow_headers=["*"]))
    handlers: dict[Any, Any] = {NanoEngineError: _answer_error, HTTPException: _answer_http_error}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False  # to whatever host the request names
    return app


def http_settings(serving: ServedApplication, endpoints: Sequence[Endpoint] = (*ENDPOINTS, VIEW)) -> uvicorn.Config:
    """The settings of uvicorn for the application."""
    connections = Quota.of_positions(serving.config.max_connections)
    settings = uvicorn.Config(
        make_app(serving, endpoints),
        http=partial(CountedHTTP, connections),  # type: ignore[arg-type]
        loop="asyncio",  # its TLS is a protocol above a socket's
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # ours says more
        server_header=False,
        proxy_headers=serving.config.forwarded_allow_ips is not None,
        forwarded_allow_ips=list(serving.config.forwarded_allow_ips or ()),
        timeout_graceful_shutdown=LAST_EVENT_SECONDS,
        **serving.config.tls,
    )
    if serving.config.tls:
        settings.load()
        assert settings.ssl is not None
        settings.http_protocol_class = partial(CountedTLS.of, connections, settings.ssl)  # type: ignore[assignment]
        settings.ssl = None  # a layer of asyncio below the protocol would count nothing before its handshake
    return settings


async def _answer_error(http: HTTPRequest, error: NanoEngineError) -> Response:
    problem = api_error_of(error)
    if problem.status >= 500 and not isinstance(error, APIError):
        logger.error("%s: %s", http.url.path, error, exc_info=error)
    return problem.response(http.scope)


async def _answer_http_error(http: HTTPRequest, error: HTTPException) -> Response:
    """Answer an error of Starlette: no such path, no such method."""
    problem = APIError(404, f"there is no {http.url.path[:80]} here; /openapi.json lists what there is")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        problem = APIError(405, f"{http.url.path[:80]} does not take {http.method}", headers=error.headers)
    return problem.response(http.scope)
