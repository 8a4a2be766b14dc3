"""Endpoints for the operation of a server of several models: health, metrics, loads and unloads."""

from __future__ import annotations

from http import HTTPStatus

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.serve.front.front import Envelope, Front
from nanoengine.serve.front.metrics import merged
from nanoengine.serve.server.apis.json_response import json_response
from nanoengine.serve.server.apis.ollama.chat import loaded_answer
from nanoengine.serve.server.errors import RETRY_AFTER, APIError
from nanoengine.serve.server.metrics import CONTENT_TYPE

EMPTY = (b"", b'""', b"[]", b"null")


async def health(http: HTTPRequest, front: Front) -> Response:
    """200 while requests are served; with `?model=NAME`: while that model is loaded, and its server says so."""
    if front.is_draining:
        return json_response({"status": "the server is shutting down"}, 503)
    if (name := http.query_params.get("model")) is None:
        return Response(status_code=200)
    model = front.model_of(name)
    status, body = (await front.ask("/health", [model])).get(model, (503, b""))
    if status != HTTPStatus.OK and not body:
        return json_response({"status": f"the model {model.name} is {model.state.value}"}, 503)
    return Response(body, status, media_type="application/json")


async def metrics(_: HTTPRequest, front: Front) -> Response:
    """The metrics of all loaded models, each with the label `model`, and the number of models in each state."""
    answers = await front.ask("/metrics")
    texts = {model.name: body.decode() for model, (status, body) in answers.items() if status == HTTPStatus.OK}
    states = {model.name: model.state.value for model in front.loader.models}
    return Response(merged(texts, states), media_type=CONTENT_TYPE)


async def load_model(http: HTTPRequest, front: Front) -> Response:
    """Load a model now, although its last load failed; the answer comes when it is loaded."""
    _, envelope = await front.read(http)
    model = front.model_of(envelope.model)
    front.check_open()
    with front.loader.using(model, front.keep_alive_of(envelope)):
        await front.loader.loaded(model, now=True)
    return json_response({"success": True})


async def unload_model(http: HTTPRequest, front: Front) -> Response:
    """Unload a model without requests; the answer comes when its memory is free."""
    _, envelope = await front.read(http)
    model = front.model_of(envelope.model)
    if model.num_running or not await front.loader.unload(model):
        raise APIError(503, f"the model {model.name} has {model.num_running} requests: try again", headers=RETRY_AFTER)
    return json_response({"success": True})


def is_empty(envelope: Envelope) -> bool:
    """Whether a request of Ollama's interface has nothing to answer."""
    return all(bytes(value) in EMPTY for value in (envelope.prompt, envelope.messages, envelope.suffix))


def unloaded(http: HTTPRequest, envelope: Envelope) -> Response:
    """The answer to an empty request with keep_alive 0 for a model that is not loaded."""
    empty = {"message": {"role": "assistant", "content": ""}} if http.url.path == "/api/chat" else {"response": ""}
    return loaded_answer(str(envelope.model), "unload", **empty)
