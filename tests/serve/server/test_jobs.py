"""Jobs end with their client, in time, or when someone ends them; within one step, all that they held is free."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import pytest

from nanoengine.serve.server.http.app import make_app
from tests.serve.server.conftest import Held, MakeServer
from tests.serve.server.events import read_events, reasons_of, text_of
from tests.serve.server.in_process import post
from tests.serve.server.interface import Interface
from tests.serve.server.interfaces import INTERFACES
from tests.serve.server.running import JSON, Answer, Server, body_of, post_bytes, read_all, until

LONG = "abcdefgh" * 50
WAYS = {
    "completion": ("/v1/completions", {"prompt": LONG, "max_tokens": 400}),
    "completions": ("/v1/completions", {"prompt": [LONG, LONG], "n": 2, "max_tokens": 400}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "n": 2}),
}


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    return make_server()


def hang_up(connection: socket.socket, rudely: bool) -> None:
    """Close a connection, perhaps by a reset."""
    if rudely:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


# ---- the client hangs up


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 20])
@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_is_gone_costs_one_step(server: Server, way: str, num_steps: int, stream: bool) -> None:
    path, body = WAYS[way]
    server.gate.shut()
    connection = server.connect(post_bytes(path, body | {"stream": stream}))
    server.gate.let(num_steps)
    assert not (stream and num_steps) or connection.recv(1) == b"H"
    server.gate.wait_until_held()
    hang_up(connection, rudely=stream)
    server.wait_until_ended()
    server.gate.let()
    server.check_idle()
    assert server.gate.num_steps == num_steps + 1


@pytest.mark.parametrize("share", [0.3, 0.95])
def test_a_client_that_is_gone_before_its_request_was_whole_starts_nothing(server: Server, share: float) -> None:
    data = post_bytes(*WAYS["completion"])
    connection = server.connect(data[: int(share * len(data))])
    hang_up(connection, rudely=False)
    assert server.complete("abc", max_tokens=3).json["choices"][0]["text"] == "abc"
    assert not len(server.serving.jobs)
    assert server.metrics().num_requests == 1


def test_a_client_that_is_gone_while_it_waits_is_not_started(make_server: MakeServer) -> None:
    server = make_server({"max_num_seqs": 1})
    server.gate.shut()
    first = server.connect(post_bytes(*WAYS["completion"]))
    server.gate.wait_until_held()
    second = server.connect(post_bytes(*WAYS["completion"]))
    until(lambda: len(server.serving.jobs) == 2)
    hang_up(second, rudely=False)
    server.wait_until_ended()
    server.gate.let()
    until(lambda: server.gate.num_steps == 1)
    server.gate.wait_until_held()
    until(lambda: len(server.serving.jobs) == 1)
    assert server.serving.engine.num_waiting == 0
    hang_up(first, rudely=False)
    server.wait_until_ended()
    server.gate.let()
    server.check_idle()


def test_the_next_request_of_a_connection_outlives_the_first(server: Server) -> None:
    """Keep-alive: what ends one answer must not end another on the same connection."""
    data = post_bytes("/v1/completions", {"prompt": "abc", "max_tokens": 9, "stream": True})
    last = post_bytes("/v1/completions", {"prompt": "abc", "max_tokens": 9, "stream": True}, "connection: close\r\n")
    response = read_all(server.connect(data + last))
    first, second = (b"HTTP/1.1" + part for part in response.split(b"HTTP/1.1")[1:])
    for part in (first, second):
        assert text_of(read_events(body_of(part))) == "abc"


# ---- slow readers


def test_a_reader_that_reads_nothing_holds_no_other_up(make_server: MakeServer) -> None:
    server = make_server()
    body = {"prompt": LONG, "max_tokens": 400, "stream": True, "n": 4, "return_token_ids": True}
    body |= {"request_id": "x" * 100}
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect(server.address)
    connection.sendall(post_bytes("/v1/completions", body, "connection: close\r\n"))
    until(lambda: len(server.serving.jobs) == 1)
    assert server.complete("abc", max_tokens=9).json["choices"][0]["text"] == "abc"
    until(lambda: not server.serving.engine.engine.has_unfinished)
    events = read_events(body_of(read_all(connection)))
    for index in range(4):
        assert (text_of(events, index), reasons_of(events, index)) == (LONG, ["length"])


# ---- what comes comes at once


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_token_is_on_its_way_before_the_next_is_computed(server: Server, path: str) -> None:
    body = {"prompt": "abcdef", "messages": [{"role": "user", "content": "abcdef"}], "max_tokens": 6, "stream": True}
    body.pop("messages" if path == "/v1/completions" else "prompt")
    server.gate.shut()
    connection = server.connect(post_bytes(path, body))
    received = b""
    for num_tokens in range(1, 7):
        server.gate.let()
        while received.count(b'"finish_reason":null,"') + received.count(b'"finish_reason":"') < num_tokens:
            received += connection.recv(1 << 16)
        assert server.gate.num_steps == num_tokens
    connection.close()


# ---- the clock


def test_time_that_is_over_while_a_text_is_encoded(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server(request_timeout=0.3)
    held = Held(monkeypatch, type(server.serving.tokenizer), "encode")
    for path, body in (WAYS["completion"], WAYS["chat"], ("/tokenize", {"prompt": LONG})):
        assert server.post(path, body).error["code"] == 504
    held.let_go()


def test_who_is_cut_off_before_a_job_is_told_so(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As uvicorn cuts off at the end of the server what has no job yet."""
    server = make_server()
    held, app = Held(monkeypatch, type(server.serving.tokenizer), "encode"), make_app(server.serving)

    async def ask(interface: Interface) -> Answer:
        body = json.dumps(interface.body([("user", LONG)], model="parrot")).encode()
        task = asyncio.create_task(post(app, interface.path, body))
        await asyncio.sleep(0.1)
        task.cancel()
        status, said = await task
        return Answer(status, JSON, said)

    for own in INTERFACES:
        answer = asyncio.run(ask(own))
        assert (answer.status, "shutting down" in own.error(answer)) == (503, True)
    held.let_go()


# ---- failures


def test_a_failed_step_is_told_to_its_requests_alone(make_server: MakeServer) -> None:
    server = make_server({"policy": "prefill_first"})  # the good one is in no step with a bad one
    server.gate.shut()
    good = server.later(server.complete, LONG, max_tokens=100)
    server.gate.wait_until_held()
    server.gate.let(2)
    prompts = "\x01bc", ["\x01de", "fine"]
    bad = [
        server.later(server.complete, prompt, max_tokens=5, stream=stream)
        for prompt in prompts
        for stream in (False, True)
    ]
    server.gate.open()
    assert good.result().json["choices"][0]["text"] == LONG[:100]
    for whole, streamed in ((bad[0].result(), bad[1].result()), (bad[2].result(), bad[3].result())):
        assert whole.status == 500
        assert "the step broke" in whole.error["message"]
        assert "the step broke" in streamed.events[-1]["error"]["message"]
    assert server.complete("abc", max_tokens=3).status == 200
    server.check_idle()
