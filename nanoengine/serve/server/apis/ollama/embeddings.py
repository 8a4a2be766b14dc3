"""Ollama's POST /api/embed."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.core.sequence import Request
from nanoengine.features.pooling.params import PoolingParams
from nanoengine.serve.server.apis.json_response import ChunkedJSONResponse, encode, json_response
from nanoengine.serve.server.apis.ollama.chat import OllamaEmbedRequest
from nanoengine.serve.server.apis.openai.embeddings import EmbeddingSubmission, vector_of
from nanoengine.serve.server.bodies.params import prompt_list
from nanoengine.serve.server.bodies.protocol import Queued
from nanoengine.serve.server.scope import new_id
from nanoengine.serve.server.served_model import ServedModel


async def embed(http: HTTPRequest, serving: ServedModel) -> Response:
    """Embed texts. What is too long is cut at its end, unless that is refused."""
    start = time.monotonic_ns()
    request, inputs = await serving.read_as(
        http,
        OllamaEmbedRequest,
        lambda body: prompt_list(body.input, "input", serving.config.max_prompts) if body.input else [],  # type: ignore[arg-type]
    )
    if not inputs:  # so that a model is loaded: it is
        return json_response({"model": request.model, "embeddings": []})
    queued = Queued(truncation_side="right", truncate_prompt_tokens=None if request.truncate is False else -1)
    params = PoolingParams(dimensions=request.dimensions)
    submission = EmbeddingSubmission(http, serving, queued, new_id("ollama-", http, None), params)
    requests = await submission.embedded(inputs)
    return ChunkedJSONResponse(await serving.text.run(partial(_body, request.model, start, requests)))


def _body(model: str, start: int, requests: list[Request]) -> list[bytes]:
    pieces = [encode({"model": model})[:-1] + b',"embeddings":[']
    for request in requests:
        pieces += [encode(vector_of(request).tolist()), b","]
    rest: dict[str, Any] = {
        "total_duration": time.monotonic_ns() - start,
        "load_duration": 0,
        "prompt_eval_count": sum(len(request.prompt_token_ids) for request in requests),
    }
    pieces[-1] = b"]," + encode(rest)[1:]
    return pieces
