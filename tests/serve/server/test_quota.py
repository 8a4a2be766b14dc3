"""Quotas: nobody fills the memory with one request or with many, and others are let in all the same."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from nanoengine.errors import InvalidConfig
from nanoengine.serve.server.admission.quota import Quota
from nanoengine.serve.server.apis.json_response import PIECE_BYTES, in_pieces
from nanoengine.serve.server.config import ServerConfig
from nanoengine.serve.server.errors import APIError
from tests.serve.server.conftest import MakeServer
from tests.serve.server.running import Server, until


def test_a_client_has_a_quarter_and_all_have_the_whole() -> None:
    budget = Quota.of_bytes(400, "max_answer_bytes", "this answer may take {}", "ask for fewer")
    with pytest.raises(
        APIError, match=r"may take 101 .* have 100 bytes \(a quarter of max_answer_bytes\): ask for fewer"
    ) as met:
        budget.check("a", 101, 101)
    assert met.value.status == 400
    with ExitStack() as held:
        for client in "abcd":
            held.enter_context(budget.hold(client, 60)).add(35)
        with pytest.raises(APIError, match="95 bytes by you") as met:
            held.enter_context(budget.hold("a", 6))
        assert met.value.status == 429
        with pytest.raises(APIError, match=r"380 bytes of 400 bytes \(max_answer_bytes\) are taken") as met:
            held.enter_context(budget.hold("e", 21))
        assert (met.value.status, met.value.headers) == (503, {"retry-after": "1"})
        held.enter_context(budget.hold("e", 20))
    assert (budget.total, budget.of_clients) == (0, {})


def test_places_are_for_one_client_but_a_part_of_them_that_each_of_the_others_has() -> None:
    places = Quota.of_positions(16)

    def take(client: str, size: int = 1) -> bool:
        has_room = places.has_room(client, size)
        places.take(client, size)
        return has_room

    assert [take("a") for _ in range(17)] == [True] * 16 + [False]
    assert [take("b") for _ in range(3)] == [True, True, False]
    opened = [take(f"c{i}") for i in range(20)]
    assert sum(opened) == 12, "twice as many as may be are the most"
    for client in ["a"] * 17 + ["b"] * 3 + [f"c{i}" for i in range(20)]:
        places.release(client)
    assert (places.total, places.of_clients) == (0, {})


def test_what_a_request_gives_back_early_is_not_given_back_again() -> None:
    places = Quota.of_positions(16, "max_waiting", "prompts times n are {}", "sequences")
    with places.hold("a", 3) as held, places.hold("b", 1):
        held.release(2)
        assert (places.total, places.of_clients) == (2, {"a": 1, "b": 1})
    held.release(1)  # of a request that has ended
    assert (places.total, places.of_clients) == (0, {})
    with places.hold("a", 16, total=0), pytest.raises(APIError, match="20 sequences of 16 sequences") as met:
        places.check("b", 3, 3, total=20)
    assert met.value.status == 503


def test_pieces_are_the_same_bytes() -> None:
    parts = [b"a", b"b" * (3 * PIECE_BYTES + 5), b"", b"c" * 10]
    pieces = list(in_pieces(parts))
    assert b"".join(pieces) == b"".join(parts)
    assert max(map(len, pieces)) < 2 * PIECE_BYTES


BIG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a" * 5000, "n": 4, "echo": True, "truncate_prompt_tokens": 4}),
    ("/v1/completions", {"prompt": "a" * 20, "prompt_logprobs": 5}),
    ("/v1/completions", {"prompt": "a", "logprobs": 5, "max_tokens": 100}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a" * 5000}], "n": 4, "truncate_prompt_tokens": 4}
        | {"echo": True, "add_generation_prompt": False},
    ),
]


@pytest.mark.parametrize(("path", "body"), BIG)
def test_an_answer_that_can_never_fit_is_refused(make_server: MakeServer, path: str, body: dict[str, Any]) -> None:
    server = make_server(max_answer_bytes=4 * 50_000)
    refused = server.post(path, body)
    assert refused.status == 400
    assert "max_answer_bytes" in refused.error["message"]
    assert server.complete("a", max_tokens=3).status == 200
    until(lambda: not server.serving.admission.answers.total)
    server.check_idle()


def test_what_does_not_fit_now_is_refused_for_now(make_server: MakeServer) -> None:
    server = make_server(max_answer_bytes=4 * 30_000)
    server.gate.shut()
    first = server.later(server.complete, "a" * 100, max_tokens=900)
    refused = server.complete("a" * 100, max_tokens=900)
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    server.gate.open()
    assert first.result().status == 200
    until(lambda: not server.serving.admission.answers.total)
    assert server.complete("a" * 100, max_tokens=900).status == 200


def test_bodies_that_do_not_end_take_a_part_of_the_memory(make_server: MakeServer) -> None:
    server: Server = make_server(max_body_bytes=1 << 20, max_held_body_bytes=4 << 20)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 900000\r\n\r\n"
    with ExitStack() as open_ones:
        stalled = open_ones.enter_context(server.connect(head + b" " * 800_000))
        until(lambda: server.serving.admission.bodies.total == 800_000)
        other = open_ones.enter_context(server.connect(head + b" " * 800_000))
        assert b" 429 " in other.recv(1000)
        assert server.complete("a", max_tokens=1).status == 200
        stalled.shutdown(2)
    until(lambda: not server.serving.admission.bodies.total)


def test_a_body_must_fit_into_its_budget() -> None:
    with pytest.raises(
        InvalidConfig, match="max_body_bytes is 1000 bytes: it must be at most a quarter of max_held_body_bytes"
    ):
        ServerConfig(max_body_bytes=1000, max_held_body_bytes=3999)
