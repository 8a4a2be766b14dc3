"""Jobs end with their client, in time, or when someone ends them; within one step, all that they held is free."""

from __future__ import annotations

import selectors
import socket
import struct
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest

from tests.server.conftest import MakeServer
from tests.server.events import read_events, reasons_of, text_of
from tests.server.running import Answer, Server, body_of, post_bytes, read_all, until

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


def later(function: Callable[..., Answer], *args: Any, **kwargs: Any) -> tuple[Thread, list[Answer]]:
    """Call something in a thread; the list will hold its result."""
    answers: list[Answer] = []
    thread = Thread(target=lambda: answers.append(function(*args, **kwargs)))
    thread.start()
    return thread, answers


# ---- the client hangs up


@pytest.mark.parametrize("rudely", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_is_gone_before_the_first_byte_costs_one_step(
    server: Server, way: str, stream: bool, rudely: bool
) -> None:
    path, body = WAYS[way]
    server.gate.shut()
    connection = server.connect(post_bytes(path, body | {"stream": stream}))
    server.gate.wait_until_held()
    hang_up(connection, rudely)
    server.wait_until_ended()
    server.gate.let()
    server.check_idle()
    assert server.gate.num_steps == 1


@pytest.mark.parametrize("num_steps", [1, 20])
@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_is_gone_in_the_middle_of_a_stream_costs_one_step(
    server: Server, way: str, num_steps: int
) -> None:
    path, body = WAYS[way]
    server.gate.shut()
    connection = server.connect(post_bytes(path, body | {"stream": True}))
    server.gate.let(num_steps)
    assert connection.recv(1).startswith(b"H")
    server.gate.wait_until_held()
    hang_up(connection, rudely=True)
    server.wait_until_ended()
    server.gate.let()
    server.check_idle()
    assert server.gate.num_steps == num_steps + 1


def test_a_client_that_is_gone_in_the_middle_of_a_whole_answer_costs_one_step(server: Server) -> None:
    path, body = WAYS["completions"]
    server.gate.shut()
    connection = server.connect(post_bytes(path, body))
    server.gate.let(20)
    server.gate.wait_until_held()
    hang_up(connection, rudely=False)
    server.wait_until_ended()
    server.gate.let()
    server.check_idle()
    assert server.gate.num_steps == 21


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


def test_500_slow_readers_get_all_of_it(make_server: MakeServer) -> None:
    server = make_server({"num_blocks": 20_000, "max_num_seqs": 256}, access_log=False)
    text = "slow reader "
    request = post_bytes("/v1/completions", {"prompt": text, "max_tokens": 20, "stream": True}, "connection: close\r\n")
    server.gate.shut()
    readers = [server.connect(request) for _ in range(500)]
    until(lambda: len(server.serving.jobs) == 500)
    server.gate.open()
    until(lambda: not server.serving.engine.engine.has_unfinished)
    received = dict.fromkeys(readers, b"")
    with selectors.DefaultSelector() as selector:
        for reader in readers:
            selector.register(reader, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                reader: Any = key.fileobj
                part = reader.recv(1000)
                received[reader] += part
                if not part:
                    selector.unregister(reader)
                    reader.close()
    for response in received.values():
        events = read_events(body_of(response))
        assert (text_of(events), reasons_of(events)) == (text, ["stop"])
    server.check_idle()


def test_a_reader_that_reads_nothing_holds_no_other_up(make_server: MakeServer) -> None:
    server = make_server()
    body = {
        "prompt": LONG,
        "max_tokens": 400,
        "stream": True,
        "n": 4,
        "return_token_ids": True,
        "request_id": "x" * 100,
    }
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


def test_a_request_that_takes_too_long_is_ended_with_504(make_server: MakeServer) -> None:
    server = make_server(request_timeout=0.2)
    server.gate.shut()
    thread, answers = later(server.complete, LONG, max_tokens=400)
    until(lambda: len(server.serving.jobs) == 1)
    server.gate.wait_until_held()
    server.wait_until_ended()
    server.gate.let()
    thread.join()
    [answer] = answers
    assert answer.status == 504
    assert "request_timeout" in answer.error["message"]
    assert answer.error["type"] == "TimeoutError"
    server.check_idle()


def test_a_stream_that_takes_too_long_says_so_and_ends(make_server: MakeServer) -> None:
    server = make_server(request_timeout=0.2)
    server.gate.shut()
    server.gate.let(3)
    thread, answers = later(server.complete, LONG, max_tokens=400, stream=True)
    until(lambda: server.gate.num_steps == 3)
    server.wait_until_ended()
    server.gate.let()
    thread.join()
    events = answers[0].events
    assert events[-1]["error"]["code"] == 504
    assert LONG.startswith(text_of(events[:-1]))
    server.check_idle()


def test_a_request_in_time_hears_nothing_of_it(make_server: MakeServer) -> None:
    server = make_server(request_timeout=60.0)
    assert server.complete("abc", max_tokens=3).json["choices"][0]["finish_reason"] == "length"


# ---- failures


def test_a_failed_step_is_told_to_its_requests_alone(make_server: MakeServer) -> None:
    server = make_server({"policy": "prefill_first"})  # the good one is in no step with a bad one
    server.gate.shut()
    good, good_answers = later(server.complete, LONG, max_tokens=100)
    server.gate.wait_until_held()
    server.gate.let(2)
    bad, bad_answers = later(server.complete, "\x01bc", max_tokens=5)
    bad_stream, bad_events = later(server.complete, "\x01cd", max_tokens=5, stream=True)
    bad_batch, bad_batches = later(server.complete, ["\x01de", "fine"], max_tokens=4)
    bad_streams, bad_pieces = later(server.complete, ["\x01ef", "fine"], max_tokens=4, stream=True)
    until(lambda: len(server.serving.jobs) == 5)
    server.gate.open()
    for thread in (good, bad, bad_stream, bad_batch, bad_streams):
        thread.join()
    assert good_answers[0].json["choices"][0]["text"] == LONG[:100]
    for answers in (bad_answers, bad_batches):
        assert answers[0].status == 500
        assert "the step broke" in answers[0].error["message"]
    for answers in (bad_events, bad_pieces):
        assert "the step broke" in answers[0].events[-1]["error"]["message"]
    assert server.complete("abc", max_tokens=3).status == 200
    server.check_idle()
