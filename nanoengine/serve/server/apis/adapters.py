"""Loading and unloading of adapters, as vLLM's clients do it. To clients each is a model."""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.errors import InvalidRequest, InvalidWeights, ModelNotFound, UnsupportedModel, shown
from nanoengine.features.lora.adapters import Adapters
from nanoengine.serve.server.bodies.protocol import LoadAdapterRequest, UnloadAdapterRequest
from nanoengine.serve.server.errors import APIError
from nanoengine.serve.server.served_model import ServedModel


async def load_adapter(http: HTTPRequest, serving: ServedModel) -> Response:
    """Load an adapter from a folder. A name that is in use is refused, unless the adapter is to replace that one."""
    adapters = _adapters(serving)
    request = await serving.read(http, LoadAdapterRequest)
    name = request.lora_name
    if serving.names.is_model(name):
        raise APIError(400, f"{shown(name)} is a name of the model itself: choose another", "lora_name")
    load = partial(adapters.load, name, request.lora_path, replaces=bool(request.load_inplace))
    try:
        await asyncio.to_thread(load)
    except (ModelNotFound, InvalidWeights, UnsupportedModel, InvalidRequest) as error:
        field = "lora_name" if isinstance(error, InvalidRequest) else "lora_path"
        raise APIError(404 if isinstance(error, ModelNotFound) else 400, str(error), field) from error
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(http: HTTPRequest, serving: ServedModel) -> Response:
    """Unload an adapter; requests that have it keep it."""
    adapters = _adapters(serving)
    name = (await serving.read(http, UnloadAdapterRequest)).lora_name
    try:
        adapters.unload(name)
    except InvalidRequest as error:
        raise APIError(404, str(error), "lora_name") from error
    await serving.engine.call(_give_memory_back)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _adapters(serving: ServedModel) -> Adapters:
    if serving.adapters is None:
        raise APIError(400, "this server has no adapters: start it with --enable-lora")
    return serving.adapters


def _give_memory_back(engine: LLMEngine) -> None:
    """A step tells the runner what it may drop; where none comes, one is made."""
    if not engine.has_unfinished:
        engine.step()
