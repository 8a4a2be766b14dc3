"""Answers of servers, however they are sent."""

from __future__ import annotations

import pytest

from benchmarks.http_client import Answer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENTS = b"data: {}\n\ndata: [DONE]\n\n"


def test_a_length_chunks_or_the_end_of_the_connection_say_how_long_an_answer_is() -> None:
    chunked = b"transfer-encoding: chunked\r\n\r\n8\r\ndata: {}\r\n10\r\n\n\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    for rest in (b"content-length: 24\r\n\r\n" + EVENTS, chunked, b"\r\n" + EVENTS):
        answer = Answer.of_bytes(HEAD + rest)
        assert (answer.status, answer.body) == (200, EVENTS), rest
        assert answer.is_ok
        assert answer.is_stream
        assert answer.is_done


@pytest.mark.parametrize(
    ("received", "error"),
    [
        (b"", "the connection ended before the answer"),
        (HEAD + b"content-length: 99\r\n\r\n" + EVENTS, "the connection ended within the answer"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n8\r\ndata: {}\r\n", "the connection ended within the answer"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nno", "no"),
        (HEAD + b'\r\ndata: {}\n\ndata: {"error": 1}\n\n', 'data: {"error": 1}'),
    ],
)
def test_what_went_wrong_is_said(received: bytes, error: str) -> None:
    answer = Answer.of_bytes(received)
    assert answer.error == error
    assert not answer.is_ok
