"""POST /score and /rerank: how alike two texts are, by the cosine of their embeddings.

Paths and shapes are vLLM's; those of /rerank are Jina's and Cohere's as well.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.core.sequence import Request
from nanoengine.pooling.params import PoolingParams
from nanoengine.server.answers import json_response
from nanoengine.server.embeddings import embedded, usage, vector_of
from nanoengine.server.errors import Problem
from nanoengine.server.protocol import RerankRequest, ScoreRequest, Table
from nanoengine.server.serving import Serving, new_id


async def score(http: HTTPRequest) -> Response:
    """Score pairs of texts, or one text with each of others."""
    serving: Serving = http.app.state.serving
    request = await serving.read(http, ScoreRequest)
    first, second = request.sides
    job_id = new_id("score-", http, request.request_id)
    requests = await _embedded(http, request, job_id, first, second, is_repeated=False)

    def scored() -> Response:
        scores = enumerate(_scores(requests, len(first)))
        data = [{"index": index, "object": "score", "score": own} for index, own in scores]
        common = {"id": job_id, "object": "list", "created": int(time.time()), "model": serving.name}
        return json_response({**common, "data": data, "usage": usage(serving, requests)})

    return await serving.text.run(scored)


async def rerank(http: HTTPRequest) -> Response:
    """Sort documents by how well they fit a query, the best first."""
    serving: Serving = http.app.state.serving
    request = await serving.read(http, RerankRequest)
    documents = [request.documents] if isinstance(request.documents, str) else request.documents
    job_id = new_id("rerank-", http, request.request_id)
    requests = await _embedded(http, request, job_id, [request.query], documents, is_repeated=True)

    def ranked() -> Response:
        scores = _scores(requests, 1)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
        results: list[Table] = [{"index": index, "relevance_score": scores[index]} for index in order]
        if request.return_documents is not False:
            for result in results:
                result["document"] = {"text": documents[result["index"]]}
        return json_response(
            {"id": job_id, "model": serving.name, "usage": usage(serving, requests), "results": results}
        )

    return await serving.text.run(ranked)


async def _embedded(
    http: HTTPRequest,
    request: ScoreRequest | RerankRequest,
    job_id: str,
    first: list[str],
    second: list[str],
    *,
    is_repeated: bool,
) -> list[Request]:
    limit = http.app.state.serving.config.max_prompts
    if (count := len(first) + len(second)) > limit:
        raise Problem(400, f"there are {count} texts: this server allows {limit} (max_prompts)", "documents")
    texts, repeated = [*first, *second], sum(map(len, second)) if is_repeated else 0
    return await embedded(http, request, job_id, texts, PoolingParams(normalize=False), repeated=repeated)


def _scores(requests: list[Request], num_first: int) -> list[float]:
    """Of each text behind the first ones, with that of its place among those, or with the only one."""
    vectors = [vector_of(own).astype(np.float64) for own in requests]
    return [cosine(vectors[place % num_first], other) for place, other in enumerate(vectors[num_first:])]


def cosine(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Of the angle between two vectors; 0 if one has no length. In numpy's own order of adding, as embeddings are made."""
    lengths = float(np.sqrt(np.sum(one * one) * np.sum(other * other)))
    return float(np.sum(one * other)) / lengths if lengths else 0.0
