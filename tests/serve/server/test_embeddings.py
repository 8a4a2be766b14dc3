"""Embeddings over HTTP are those of `LLM.embed`, to the bit."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from nanoengine import LLM, PoolingParams
from tests.serve.server.conftest import demo_server
from tests.serve.server.running import Answer, Server, until

TEXTS = ["def search(", "class Tree:", "import os\nimport sys", "x" * 200]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", use_tqdm=False, dtype="float32", device="cpu", num_kv_blocks=600) as llm:
        yield llm


def offline(llm: LLM, prompts: Any, **params: Any) -> list[np.ndarray[Any, Any]]:
    return [own.embedding for own in llm.embed(prompts, PoolingParams(**params), use_tqdm=False)]


def vectors(answer: Answer) -> list[np.ndarray[Any, Any]]:
    """What an answer holds, in float32; numbers in JSON are exactly those."""
    assert answer.status == 200, answer.body
    found = answer.json
    assert found["object"] == "list"
    assert [own["index"] for own in found["data"]] == list(range(len(found["data"])))
    said = [own["embedding"] for own in found["data"]]
    if isinstance(said[0], str):
        return [np.frombuffer(base64.b64decode(own), "<f4") for own in said]
    assert all(float(np.float32(number)) == number for own in said for number in own)
    return [np.array(own, np.float32) for own in said]


def same(found: list[np.ndarray[Any, Any]], expected: list[np.ndarray[Any, Any]]) -> bool:
    return [own.tobytes() for own in found] == [own.tobytes() for own in expected]


@pytest.mark.parametrize("as_base64", [False, True])
@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({}, {}),
        ({"dimensions": 5}, {"dimensions": 5}),
        ({"use_activation": False}, {"normalize": False}),
        ({"user": "me", "model": "demo", "encoding_format": None}, {}),
    ],
    ids=str,
)
def test_numbers_are_those_of_llm_embed(
    demo: Server, llm: LLM, fields: dict[str, Any], params: dict[str, Any], as_base64: bool
) -> None:
    own = fields | ({"encoding_format": "base64"} if as_base64 else {})
    answer = demo.post("/v1/embeddings", {"input": TEXTS, **own})
    assert same(vectors(answer), offline(llm, TEXTS, **params))


def test_all_kinds_of_input_are_taken(demo: Server, llm: LLM) -> None:
    ids = [llm.engine.encode(text) for text in TEXTS]
    inputs: list[Any] = [TEXTS[0], TEXTS, ids[0], ids, [TEXTS[0], ids[1]]]
    for own in inputs:
        answer = demo.post("/v1/embeddings", {"input": own})
        several = own if isinstance(own, list) and not isinstance(own[0], int) else [own]
        assert same(vectors(answer), offline(llm, several))
        num_tokens = sum(len(llm.engine.encode(one)) if isinstance(one, str) else len(one) for one in several)
        usage = answer.json["usage"]
        assert (usage["prompt_tokens"], usage["total_tokens"], usage["completion_tokens"]) == (
            num_tokens,
            num_tokens,
            0,
        )
    last = demo.post("/v1/embeddings", {"input": ids[3], "truncate_prompt_tokens": 5})
    assert same(vectors(last), offline(llm, [ids[3][-5:]]))
    first = demo.post("/v1/embeddings", {"input": ids[3], "truncate_prompt_tokens": 5, "truncation_side": "right"})
    assert same(vectors(first), offline(llm, [ids[3][:5]]))


def test_an_answer_that_is_too_large_for_the_budget_is_refused(demo: Server) -> None:
    answers = demo.serving.admission.answers
    least = answers.of_client
    try:
        answers.of_client = 4 * 1000
        answer = demo.post("/v1/embeddings", {"input": TEXTS})
    finally:
        answers.of_client = least
    assert answer.status == 400
    assert "max_answer_bytes" in answer.error["message"]
    until(lambda: not answers.total)


# ---- Ollama


def test_ollamas_clients_get_the_same_numbers(demo: Server, llm: LLM) -> None:
    body = demo.post(
        "/api/embed", {"model": "demo:latest", "input": TEXTS, "options": {"num_ctx": 9}, "keep_alive": "5m"}
    ).json
    assert same([np.array(own, np.float32) for own in body["embeddings"]], offline(llm, TEXTS))
    assert body["prompt_eval_count"] == sum(len(llm.engine.encode(text)) for text in TEXTS)
    one = demo.post("/api/embed", {"model": "demo", "input": TEXTS[0], "dimensions": 6}).json
    assert same([np.array(own, np.float32) for own in one["embeddings"]], offline(llm, TEXTS[0], dimensions=6))
    for empty in ("", [], None):
        assert demo.post("/api/embed", {"model": "demo", "input": empty}).json == {"model": "demo", "embeddings": []}
    assert demo.post("/api/embed", {"model": "other", "input": "a"}).status == 404


@pytest.fixture
def own_server() -> Iterator[Server]:
    with closing(demo_server({"num_kv_blocks": 100, "max_model_len": 300, "max_num_batched_tokens": 16})) as server:
        yield server


def test_ollama_cuts_what_is_too_long_at_its_end(own_server: Server, llm: LLM) -> None:
    limit = own_server.serving.max_model_len
    text = "a b c d " * limit
    ids = llm.engine.encode(text)
    assert len(ids) > limit
    cut = own_server.post("/api/embed", {"model": "demo", "input": text}).json
    assert same([np.array(own, np.float32) for own in cut["embeddings"]], offline(llm, [ids[: limit - 1]]))
    refused = own_server.post("/api/embed", {"model": "demo", "input": text, "truncate": False})
    assert refused.status == 400
    assert "max_model_len" in refused.json["error"]


# ---- whoever leaves, or is sent away


def test_an_embedding_that_is_aborted_is_none(own_server: Server) -> None:
    own_server.gate.shut()
    asked = own_server.later(own_server.post, "/v1/embeddings", {"input": TEXTS}, {"x-request-id": "own"})
    assert own_server.post("/abort_requests", {"request_ids": ["embd-own"]}).json["aborted"] == 1
    own_server.gate.open()
    assert asked.result().status == 503
    assert "aborted" in asked.result().error["message"]
    own_server.check_idle()
    until(lambda: not own_server.serving.admission.answers.total)
