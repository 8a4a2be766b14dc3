"""Bodies: bounded, typed, and never a reason to fall over."""

from __future__ import annotations

import json

import pytest

from tests.serve.server.conftest import LIMITS
from tests.serve.server.running import Server, post_bytes, read_all

NO_REQUESTS = [
    *(
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"5",
        b'{"prompt": "a"} x',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud83d"}',
    ),
    *(b'{"prompt": NaN}', b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a", "temperature": 1e999}'),
    *(b'{"prompt": "a", "%b": ' % name + b"9" * 10_000 + b"}" for name in (b"seed", b"n")),
    b'{"prompt": "a", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    *(b'{"prompt": ' + b"[" * 100_000, b"\x00" * 100, b'\xef\xbb\xbf{"prompt": 5}', b"prompt=a"),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_what_is_no_request_is_refused(parrot: Server, path: str) -> None:
    for body in NO_REQUESTS:
        answer = parrot.post(path, body)
        assert (answer.status, answer.error["type"]) == (400, "BadRequestError"), body[:40]


def test_text_may_have_nul_and_controls(parrot: Server) -> None:
    text = "a\x00b\x1b[0m\u2028\r\n\n"
    answer = parrot.complete(text, max_tokens=50, stream=True)
    assert "".join(event["choices"][0]["text"] for event in answer.events) == text


@pytest.mark.parametrize("length", [LIMITS["max_body_bytes"], LIMITS["max_body_bytes"] + 1])
def test_a_body_has_a_limit(parrot: Server, length: int) -> None:
    start, end = b'{"tokens": [1]', b"}"
    body = start + b" " * (length - len(start) - len(end)) + end
    answer = parrot.post("/detokenize", body)
    if length <= LIMITS["max_body_bytes"]:
        assert answer.status == 200
    else:
        assert answer.status == 413
        assert "max_body_bytes" in answer.error["message"]
        assert answer.error["type"] == "RequestTooLargeError"


def test_a_body_in_chunks_has_the_same_limit(parrot: Server) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    connection = parrot.connect(head + b'c\r\n{"prompt": "\r\n')
    chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
    try:
        for _ in range(40):
            connection.sendall(chunk)
    except ConnectionError:
        pass  # refused in the middle, which is as good
    assert connection.recv(12) == b"HTTP/1.1 413"


def test_a_request_may_come_byte_by_byte(parrot: Server) -> None:
    data = post_bytes("/tokenize", {"prompt": "🦜"}, "connection: close\r\n")
    connection = parrot.connect()
    for i in range(len(data)):
        connection.sendall(data[i : i + 1])
    response = read_all(connection)
    assert response.startswith(b"HTTP/1.1 200")
    assert json.loads(response.partition(b"\r\n\r\n")[2])["count"] == 4


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON ;x=y"])
def test_json_may_be_called_so(parrot: Server, kind: str) -> None:
    for mark in (b"", b"\xef\xbb\xbf"):  # some editors begin files with it
        assert parrot.post("/tokenize", mark + b'{"prompt": "a"}', {"content-type": kind}).json["count"] == 1
