"""POST /v1/embeddings: one vector for each input. Its requests are queued, counted and aborted like all others."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.core.sequence import Request
from nanoengine.features import EMBEDDING
from nanoengine.features.pooling.params import PoolingParams
from nanoengine.serve.server.apis.json_response import ChunkedJSONResponse, encode
from nanoengine.serve.server.bodies.params import prompt_list
from nanoengine.serve.server.bodies.protocol import EmbeddingRequest, Queued
from nanoengine.serve.server.errors import APIError
from nanoengine.serve.server.scope import new_id
from nanoengine.serve.server.served_model import ServedModel
from nanoengine.serve.server.submission import Submission

NUMBER_BYTES = 32
"""Bytes of a number of an embedding, as it is computed and as JSON."""

FEW_NUMBERS = 1 << 14
"""Answers with more numbers are encoded in a thread."""


async def embeddings(http: HTTPRequest, serving: ServedModel) -> Response:
    """Embed texts, or lists of token ids."""
    request, inputs = await serving.read_as(
        http, EmbeddingRequest, lambda body: prompt_list(body.input, "input", serving.config.max_prompts)
    )
    params = PoolingParams(dimensions=request.dimensions, normalize=request.use_activation)
    job_id = new_id("embd-", http, request.request_id)
    requests = await EmbeddingSubmission(http, serving, request, job_id, params).embedded(inputs)
    body = partial(_body, serving, job_id, request.encoding_format == "base64")
    return ChunkedJSONResponse(await serving.make(body, requests, slow=_num_numbers(requests) > FEW_NUMBERS))


class EmbeddingSubmission(Submission[Queued]):
    """Computes the embedding of each input."""

    async def embedded(self, inputs: Sequence[str | list[int]]) -> list[Request]:
        """The requests, which hold the embeddings. Raises as `finish`."""
        self.prompts = inputs
        requests = (await self.finish()).requests
        if any(EMBEDDING not in each.sequences[0].state for each in requests):
            raise APIError(503, "the request was aborted")
        return requests

    def size(self, requests: Sequence[Request]) -> int:
        return super().size(requests) + _num_numbers(requests) * NUMBER_BYTES


def vector_of(request: Request) -> Any:
    """The embedding, as an array."""
    return request.sequences[0].state[EMBEDDING]


def _num_numbers(requests: Sequence[Request]) -> int:
    return sum(each.params.dimensions or 0 for each in requests if isinstance(each.params, PoolingParams))


def _body(serving: ServedModel, job_id: str, as_base64: bool, requests: list[Request]) -> list[bytes]:
    common = {"id": job_id, "object": "list", "created": int(time.time()), "model": serving.name}
    pieces = [encode(common)[:-1] + b',"data":[']
    for index, request in enumerate(requests):
        vector = vector_of(request)
        embedding = base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector.tolist()
        pieces += [encode({"object": "embedding", "index": index, "embedding": embedding}), b","]
    outputs = [request.output() for request in requests]
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    usage = serving.usage(num_prompt, 0, sum(output.num_cached_tokens for output in outputs))
    pieces[-1] = b"]," + encode({"usage": usage})[1:]
    return pieces
