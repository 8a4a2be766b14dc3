"""The endpoints of a server of several models: those of one model, with handlers that pass requests on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from nanoengine.serve.front import listing, operations
from nanoengine.serve.front.front import Front
from nanoengine.serve.front.relay import Relay
from nanoengine.serve.server.errors import APIError
from nanoengine.serve.server.http import endpoints as of_one
from nanoengine.serve.server.http.endpoint import LINES, Access, Endpoint

OF_LOADED = ("/view", "/abort_requests", "/reset_prefix_cache", "/restart_replicas")
"""Paths that concern what a loaded model has."""

Handler = Callable[[HTTPRequest, Front], Awaitable[Response | ASGIApp]]


def _named_in_body(endpoint: Endpoint) -> Handler:
    async def handle(http: HTTPRequest, front: Front) -> Response | ASGIApp:
        """The answer of the model that the body names."""
        body, envelope = await front.read(http)
        model, keep_alive = front.model_of(envelope.model), front.keep_alive_of(envelope)
        if endpoint.stream == LINES:
            if keep_alive == 0 and operations.is_empty(envelope) and not model.is_loaded:
                return operations.unloaded(http, envelope)
            is_stream = envelope.stream is not False
        else:
            is_stream = bool(endpoint.stream) and envelope.stream is True
        return Relay(front, model, body, is_stream, keep_alive)

    return handle


async def _named_in_query(http: HTTPRequest, front: Front) -> Relay:
    """The answer of the model of `?model=NAME`. It is loaded for it, but not to look at it."""
    model = front.model_of(http.query_params.get("model"))
    if not model.is_loaded and http.url.path in OF_LOADED:
        raise APIError(503, f"the model {model.name} is {model.state.value}")
    return Relay(front, model, await front.body(http))


async def _adapters(http: HTTPRequest, front: Front) -> Relay:
    """As `_named_in_query`; the names of the model may be others then."""
    return replace(await _named_in_query(http, front), changes_names=True)


HANDLERS: dict[str, Handler] = {
    "/v1/models": listing.models,
    "/v1/models/{name:path}": listing.model,
    "/api/tags": listing.tags,
    "/api/ps": listing.ps,
    "/api/show": listing.show,
    "/health": operations.health,
    "/ping": operations.health,
    "/": operations.health,
    "/metrics": operations.metrics,
    "/abort_requests": _named_in_query,
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _adapters),
}
"""Handlers by path; on any other the model is named in the body or, where there is none, in the query; or none is concerned
(`AS_THEY_ARE`).
"""

AS_THEY_ARE = ("/load", "/version", "/api/version", "/openapi.json")


def _of_several(endpoint: Endpoint) -> Endpoint:
    if endpoint.path in AS_THEY_ARE:
        return endpoint
    handler: Any = HANDLERS.get(endpoint.path, _named_in_body(endpoint) if endpoint.body else _named_in_query)
    return replace(endpoint, handler=handler)


ENDPOINTS = (
    *map(_of_several, (*of_one.ENDPOINTS, of_one.VIEW)),
    # llama.cpp's router
    Endpoint("GET", "/models", listing.models),
    Endpoint("POST", "/models/load", operations.load_model, access=Access.ADMIN),
    Endpoint("POST", "/models/unload", operations.unload_model, access=Access.ADMIN),
)
