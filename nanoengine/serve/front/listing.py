"""Endpoints that list models: each with its state. The facts of a model that is not loaded come from its headers."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from nanoengine.serve.front.front import Front
from nanoengine.serve.front.memory_plan import resident
from nanoengine.serve.front.model import Model, State
from nanoengine.serve.front.relay import Relay
from nanoengine.serve.server.apis.json_response import json_response
from nanoengine.serve.server.apis.ollama.chat import NEVER, shown
from nanoengine.serve.server.errors import APIError
from nanoengine.serve.server.model_card import ModelCard

VALUES = {State.NOT_LOADED: "unloaded", State.FAILED: "unloaded", State.UNLOADING: "unloaded"}
"""Names of llama.cpp's router; others are as they are."""


UNKNOWN_CARD = ModelCard(0, "", "0001-01-01T00:00:00Z", {}, {}, False)
"""Of a model that cannot be read. Ollama's clients refuse a whole list for one model without a time: this is Go's zero time."""


async def models(_: HTTPRequest, front: Front) -> Response:
    """All models and their adapters."""
    rows = [row for model in front.loader.models for row in _rows(front, model)]
    return json_response({"object": "list", "data": rows})


async def model(http: HTTPRequest, front: Front) -> Response:
    """One of them."""
    name = http.path_params["name"]
    model = front.model_of(name)
    await model.read()
    rows = _rows(front, model)
    return json_response(next((row for row in rows if row["id"] == name), rows[0]))


def _rows(front: Front, model: Model) -> list[dict[str, Any]]:
    headers = model.headers  # of many models it takes long to read them for a list
    rows = model.served or [
        {
            "id": name,
            "object": "model",
            "created": front.created,
            "owned_by": "nanoengine",
            "root": model.source.model,
            "parent": None if name == model.name else model.name,
            "max_model_len": headers.max_model_len(model.source.config) if headers else None,
        }
        for name in model.names
    ]
    return [{**row, "status": status_of(model)} for row in rows]


def status_of(model: Model) -> dict[str, Any]:
    """The state of a model: `value` and `failed` as llama.cpp's router has them, and more."""
    status: dict[str, Any] = {"value": VALUES.get(model.state, model.state.value), "state": model.state.value}
    if model.state is State.LOADING:
        status["progress"] = round(model.progress, 2)
    if model.reason:
        status |= {"failed": model.state is State.FAILED, "reason": model.reason}
    return status


async def tags(_: HTTPRequest, front: Front) -> Response:
    """All models, for Ollama's clients."""
    return json_response({"models": [row for one in front.loader.models for row in await _tagged(one)]})


async def ps(_: HTTPRequest, front: Front) -> Response:
    """The models in memory, with the bytes that their processes have."""
    rows = []
    for one, child in front.loader.in_memory.items():
        expires = NEVER
        if (seconds := one.seconds_left) < math.inf:
            expires = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
        rest = {"size_vram": 0, "expires_at": expires, "need": one.need, "num_running": one.num_running}
        rest["resident"] = resident(child.pid)
        if one.served:
            rest["context_length"] = one.served[0]["max_model_len"]
        rows += [row | rest for row in await _tagged(one)]
    return json_response({"models": rows})


async def _tagged(model: Model) -> list[dict[str, Any]]:
    headers = await model.read()
    card = UNKNOWN_CARD if headers is None else headers.card
    return [card.row(name, model.name) | {"status": status_of(model)} for name in model.names]


async def show(http: HTTPRequest, front: Front) -> Response | ASGIApp:
    """The abilities of a model: of its process, or of its headers."""
    body, envelope = await front.read(http)
    model = front.model_of(envelope.model or envelope.name)
    if model.is_loaded:
        return Relay(front, model, body)
    headers = await model.read()
    if headers is None:
        reason = model.reading and model.reading.result()
        raise APIError(404, f"the model {model.name} cannot be read: {reason}", "model")
    return json_response(shown(headers.card, headers.template, headers.max_model_len(model.source.config)))
