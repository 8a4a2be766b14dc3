"""Heads of requests are bounded, broken ones are answered, and the server goes on."""

from __future__ import annotations

import pytest

from nanoengine.serve.server.http.bounded_http import MAX_HEAD_BYTES
from nanoengine.serve.server.http.connections import client_of
from tests.serve.server.conftest import LIMITS, MakeServer
from tests.serve.server.events import read_events, text_of
from tests.serve.server.running import Server, post_bytes, read_all, until


@pytest.mark.parametrize("head", [b"GET /version HTTP/1.1\r\nx: ", b"GET /", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10])
def test_a_head_that_never_ends_is_refused(parrot: Server, head: bytes) -> None:
    connection = parrot.connect(head)
    with pytest.raises(ConnectionError):  # noqa: PT012 - it may be any of these that notices
        for _ in range(2 * MAX_HEAD_BYTES // 1024 + 5000):
            connection.sendall(b"a" * 1024)
        connection.recv(1)
        raise ConnectionError
    assert parrot.get("/version").status == 200


def test_a_long_head_is_told_so_and_one_of_usual_length_is_read(parrot: Server) -> None:
    connection = parrot.connect(b"GET /version HTTP/1.1\r\nhost: localhost\r\n")
    for _ in range(MAX_HEAD_BYTES // 1024):
        connection.sendall(b"x-a: " + b"a" * 1017 + b"\r\n")
    assert read_all(connection).startswith(b"HTTP/1.1 431 ")
    assert parrot.get("/version", {f"x-{i}": "a" * 500 for i in range(60)}).status == 200


LONG_AT_ONCE = [b"GET /version?" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"]
LONG_AT_ONCE.append(b"GET /version HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 12_000 + b"\r\n")


@pytest.mark.parametrize("head", LONG_AT_ONCE, ids=["target", "headers"])
def test_a_long_head_in_one_packet_is_refused_too(parrot: Server, head: bytes) -> None:
    """It is whole as soon as it is looked at."""
    answer = read_all(parrot.connect(head))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b" 200 " not in answer
    assert parrot.get("/version").status == 200


@pytest.mark.parametrize("hosts", [[], [""], [":8000"], ["localhost", "localhost"], ["localhost", "evil.example"]])
def test_there_is_one_host(parrot: Server, hosts: list[str]) -> None:
    """A proxy before this server may read another one of two."""
    lines = "".join(f"host: {host}\r\n" for host in hosts)
    request = f"GET /version HTTP/%s\r\n{lines}connection: close\r\n\r\n"
    assert read_all(parrot.connect((request % "1.1").encode())).startswith(b"HTTP/1.1 400 ")
    expected = b"HTTP/1.1 400 " if hosts else b"HTTP/1.1 200 "  # older clients send none
    assert read_all(parrot.connect((request % "1.0").encode())).startswith(expected)


def test_what_else_a_client_expects_is_refused(parrot: Server) -> None:
    for value, status in (("999", b"417"), ("", b"417"), ("100-Continue", b"200")):
        head = f"GET /version HTTP/1.1\r\nhost: localhost\r\nexpect: {value}\r\nconnection: close\r\n\r\n"
        assert b"HTTP/1.1 " + status in read_all(parrot.connect(head.encode()))


def test_a_client_that_sends_no_more_is_taken_to_be_gone(parrot: Server) -> None:
    """Whether it has hung up, or only closed its sending side, looks the same from here."""
    body = {"prompt": "a" * 500, "max_tokens": 400, "ignore_eos": True}
    with parrot.connect(post_bytes("/v1/completions", body)) as connection:
        until(lambda: len(parrot.serving.jobs))
        connection.shutdown(1)
        until(lambda: not len(parrot.serving.jobs))
        assert read_all(connection) == b""
    parrot.check_idle()


NO_HTTP = [b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n"]
NO_HTTP += [b"POST / HTTP/1.1\r\ncontent-length: %b\r\n\r\n" % length for length in (b"-5", b"x")]


@pytest.mark.parametrize("data", NO_HTTP, ids=repr)
def test_what_is_no_http_is_refused(parrot: Server, data: bytes) -> None:
    connection = parrot.connect(data)
    connection.shutdown(1)
    assert read_all(connection)[:12] in (b"HTTP/1.1 400", b"")
    assert parrot.get("/version").status == 200


def test_many_small_requests_of_one_connection_are_no_long_head(parrot: Server) -> None:
    """What was sent before a request, bodies of others included, does not count as its head."""
    one = post_bytes("/tokenize", {"prompt": "a" * 2000})
    last = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    response = read_all(parrot.connect(one * 100 + last))
    assert response.count(b"HTTP/1.1 200") == 101


def test_a_request_behind_a_long_body_is_no_long_head(parrot: Server) -> None:
    """Its first bytes may arrive together with the end of the body before it."""
    data = post_bytes("/tokenize", {"prompt": "a" * 300_000})
    connection = parrot.connect(data + b"GET /version HTTP/1.1\r\nhost: localhost\r\n")
    while b"\r\n\r\n" not in connection.recv(1 << 16):
        pass
    connection.sendall(b"connection: close\r\n\r\n")
    assert b"HTTP/1.1 431" not in read_all(connection)


def test_a_connection_too_many_is_refused(make_server: MakeServer) -> None:
    server = make_server(max_connections=8)
    held = [server.connect() for _ in range(8)]
    for _ in range(2):
        with server.connect() as refused:
            assert read_all(refused).startswith(b"HTTP/1.1 503 ")
    for connection in held:
        connection.close()
    until(lambda: not server.connections.total)
    assert server.get("/health").status == 200


def test_addresses_of_one_customer_are_one_client() -> None:
    same = ("2001:db8:0:1::1", "2001:db8:0:1:ffff::", "2001:db8:0:1::1%eth0")
    assert {client_of(own) for own in same} == {"2001:db8:0:1::/64"}
    assert client_of("2001:db8:0:2::1") == "2001:db8:0:2::/64"
    assert client_of("10.1.2.3") == client_of("::ffff:10.1.2.3") == "10.1.2.3"
    assert [client_of(own) for own in ("admin", "key-0", "", "a b", "x" * 9999)] == ["unknown"] * 5


def test_a_stream_to_http_1_0_ends_with_the_connection(parrot: Server) -> None:
    body = {"prompt": "abcd" * 8, "max_tokens": 32, "stream": True}
    for headers in ("", "connection: keep-alive\r\n"):
        request = post_bytes("/v1/completions", body, headers).replace(b"HTTP/1.1", b"HTTP/1.0")
        head, _, rest = read_all(parrot.connect(request)).partition(b"\r\n\r\n")
        assert b"chunked" not in head.lower()
        assert text_of(read_events(rest)) == "abcd" * 8
    whole = post_bytes("/v1/completions", body | {"stream": False}).replace(b"HTTP/1.1", b"HTTP/1.0")
    assert b"content-length" in read_all(parrot.connect(whole))


@pytest.mark.parametrize("coding", ["gzip", "gzip, chunked", "identity"])
def test_a_transfer_coding_that_is_not_known_is_refused(parrot: Server, coding: str) -> None:
    head = f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nTransfer-Encoding: {coding}\r\n\r\n0\r\n\r\n"
    assert read_all(parrot.connect(head.encode())).startswith(b"HTTP/1.1 501 ")


@pytest.mark.parametrize("expect", ["", "expect: 100-continue\r\n"])
@pytest.mark.parametrize("path", ["/tokenize", "/health", "/nowhere"])
def test_a_body_that_is_said_to_be_too_long_is_refused_before_it_comes(parrot: Server, path: str, expect: str) -> None:
    length = LIMITS["max_body_bytes"] + 1
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{expect}"
    with parrot.connect(f"{head}content-length: {length}\r\n\r\n".encode()) as connection:
        answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert (b"connection: close" in answer) == bool(expect), "what follows would be taken for the body"


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "origin"])
def test_who_somebody_is_is_said_once(parrot: Server, name: str) -> None:
    lines = f"host: localhost\r\n{name}: Bearer a\r\n{name}: Bearer b\r\nconnection: close\r\n\r\n"
    answer = read_all(parrot.connect(f"GET /version HTTP/1.1\r\n{lines}".encode()))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert name.encode() in answer
