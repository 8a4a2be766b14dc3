"""Endpoints for the operation of a server: health, version, models, metrics, aborting requests, resetting the prefix cache."""

from __future__ import annotations

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

import nanoengine
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.serve.server.apis.json_response import json_response
from nanoengine.serve.server.bodies.protocol import AbortRequest
from nanoengine.serve.server.errors import APIError
from nanoengine.serve.server.metrics import CONTENT_TYPE
from nanoengine.serve.server.scope import ADMIN, CLIENT
from nanoengine.serve.server.served_model import ServedModel


async def health(_: HTTPRequest, serving: ServedModel) -> Response:
    """200 while requests are served: 503 with the reason when the engine has died, or the server is ending."""
    if serving.closed_because is not None:
        return json_response({"status": serving.closed_because}, 503)
    return Response(status_code=200)


async def version(_: HTTPRequest, __: ServedModel) -> Response:
    """The version of the server."""
    return json_response({"version": nanoengine.__version__})


async def load(_: HTTPRequest, serving: ServedModel) -> Response:
    """The number of requests that are being answered."""
    return json_response({"server_load": len(serving.jobs)})


async def models(_: HTTPRequest, serving: ServedModel) -> Response:
    """The model, under each of its names, and its adapters."""
    names = serving.names.all
    return json_response({"object": "list", "data": [_model(serving, name) for name in names]})


async def model(http: HTTPRequest, serving: ServedModel) -> Response:
    """The model, or an adapter, if this is its name."""
    name = http.path_params["name"]
    return json_response(_model(serving, name))


def _model(serving: ServedModel, name: str) -> dict[str, object]:
    adapter = serving.names.check(name)
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "nanoengine",
        "root": serving.root if adapter is None else adapter.path,
        "parent": None if adapter is None else serving.name,
        "max_model_len": serving.max_model_len,
        "meta": {"n_ctx": serving.max_model_len},  # llama.cpp's
    }


async def metrics(http: HTTPRequest, serving: ServedModel) -> Response:
    """All counters between two steps, for Prometheus. With `?engine=all` those of replicas are added up.

    One result is cached for a second.
    """
    text = serving.summed_metrics_text if http.query_params.get("engine") == "all" else serving.metrics_text
    return Response(await text.get(), media_type=CONTENT_TYPE)


async def abort_requests(http: HTTPRequest, serving: ServedModel) -> Response:
    """End requests of this client, by the ids of their answers; all of them, if the field is missing. An admin ends anybody's.

    Without keys, many clients may come from one address, such as that of a proxy: there only an admin ends all.
    """
    request = await serving.read(http, AbortRequest)
    if request.request_ids is None and http.scope[CLIENT] != ADMIN and serving.config.api_key is None:
        raise APIError(
            403, "only an admin may abort all where there are no keys: give request_ids, or --admin-key", "request_ids"
        )
    count = serving.jobs.abort(request.request_ids, None if http.scope[CLIENT] == ADMIN else http.scope[CLIENT])
    return json_response({"status": "aborted", "aborted": count})


async def reset_prefix_cache(_: HTTPRequest, serving: ServedModel) -> Response:
    """Forget all cached prefixes; refused while requests run."""
    return json_response({"success": await serving.engine.call(LLMEngine.reset_prefix_cache)})


async def restart_replicas(_: HTTPRequest, serving: ServedModel) -> Response:
    """Start all replicas anew, one after the other; requests go on. The answer has their number, which may be 0."""
    count = await serving.engine.call(lambda engine: getattr(engine, "restart", int)())  # 0 without replicas
    return json_response({"success": count > 0, "restarting": count})
