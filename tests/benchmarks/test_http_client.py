"""The client of servers: answers come out the same however their bytes are cut, and broken ones say so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.http_client import Answer, AnswerParser, Client, Connection
from tests.drawn import FAST

EVENTS = [
    b'data: {"choices":[{"index":0,"text":"\\"","finish_reason":null}]}',
    b": still there",
    b'data: {"choices":[{"index":0,"text":"","finish_reason":null}]}',
    b'data: {"choices":[{"index":0,"text":"a\\r\\n\\r\\nb \\"finish_reason\\":\\"no\\"","finish_reason":"length"}]}',
    b"data: [DONE]",
]
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
CHUNKED_HEAD = STREAM_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def chunked(parts: list[bytes], trailer: bytes = b"") -> bytes:
    return b"".join(b"%X;name=value\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n" + trailer + b"\r\n"


def stream(trailer: bytes = b"", line_end: bytes = b"\n") -> bytes:
    """Each event a chunk of its own, but for the first two, which lie across three."""
    events = [event + 2 * line_end for event in EVENTS]
    first = events[0] + events[1]
    return CHUNKED_HEAD + chunked([first[:5], first[5:70], first[70:], *events[2:]], trailer)


def parse(pieces: list[bytes], *, keep: bool = True) -> tuple[Answer, bool]:
    """What pieces that come at the times 0, 1, 2... make, and whether the last of them, and no other, ends the answer."""
    parser = AnswerParser(keep=keep)
    ends = [parser.feed(piece, float(when)) for when, piece in enumerate(pieces)]
    return parser.answer, ends == [False] * (len(pieces) - 1) + [True]


def check_stream(answer: Answer) -> None:
    assert answer.is_ok
    assert answer.is_done
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert len(answer.event_times) == 3
    assert len(answer.text_times) == 2
    assert answer.finish_reasons == ["length"]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("trailer", [b"", b"a: b\r\nc: d\r\n"])
def test_a_stream_is_the_same_however_it_is_cut(trailer: bytes, line_end: bytes) -> None:
    data = stream(trailer, line_end)

    @FAST
    @given(st.lists(st.integers(1, len(data) - 1)))
    def check(cuts: list[int]) -> None:
        ends = sorted({*cuts, len(data)})
        answer, ended_in_time = parse([data[a:b] for a, b in zip([0, *ends], ends, strict=False)])
        assert ended_in_time
        check_stream(answer)
        assert answer.body.replace(b"\r\n", b"\n") == b"".join(event + b"\n\n" for event in EVENTS)

    check()
    check_stream(parse([data[i : i + 1] for i in range(len(data))])[0])


def test_an_event_has_the_time_of_its_last_byte() -> None:
    data = CHUNKED_HEAD + chunked([event + b"\n\n" for event in EVENTS])
    starts = [data.index(event) for event in EVENTS]
    pieces = [data[: starts[0] + 5], data[starts[0] + 5 : starts[2]], data[starts[2] : starts[3]], data[starts[3] :]]
    answer, _ = parse(pieces)
    assert answer.event_times == [1.0, 2.0, 3.0]
    assert answer.text_times == [1.0, 3.0]
    assert answer.ended == 3.0


@pytest.mark.parametrize("data", [stream()[:-1], stream()[:200], STREAM_HEAD, b""])
def test_an_answer_that_is_cut_off_is_an_error(data: bytes) -> None:
    parser = AnswerParser()
    parser.feed(data, 0.0)
    parser.end_of_connection(1.0)
    assert not parser.answer.is_ok
    assert "the connection ended" in (parser.answer.error or "")


def test_errors_of_the_server_are_kept() -> None:
    body = b'{"error":{"message":"too long"}}'
    answer, _ = parse([b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n" % len(body) + body])
    assert (answer.status, answer.error) == (400, body.decode())
    event = b"data: " + body + b"\n\n"
    answer, _ = parse([CHUNKED_HEAD + chunked([EVENTS[0] + b"\n\n", event, b"data: [DONE]\n\n"])])
    assert not answer.is_ok
    assert "too long" in (answer.error or "")
    assert len(answer.event_times) == 1
    with pytest.raises(ValueError, match="no HTTP"):
        parse([b"220 mail ready\r\n\r\n"])


# ---- over a socket

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Coroutine[Any, Any, None]]


def with_server(handle: Handler, use: Callable[[Client], Coroutine[Any, Any, None]]) -> int:
    """Run a server of this kind of connection, and a client of it; how many connections there were."""
    count = 0

    async def run() -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal count
            count += 1
            try:
                await handle(reader, writer, count)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass  # the client went away, as some tests have it
            finally:
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        client = Client("127.0.0.1", server.sockets[0].getsockname()[1])
        await asyncio.wait_for(use(client), 20)
        client.close()
        server.close()

    asyncio.run(run())
    return count


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return await reader.readexactly(length)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
    while True:
        body = await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nnumber: %d\r\n\r\n" % (len(body), number) + body)


async def stream_forever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:  # noqa: ARG001
    await read_request(reader)
    writer.write(CHUNKED_HEAD + chunked([EVENTS[0] + b"\n\n"])[:-5])
    await reader.readexactly(1)


def test_a_connection_is_used_again_and_requests_at_a_time_have_their_own() -> None:
    async def use(client: Client) -> None:
        for prompt in ("a", "b", "c"):
            answer = await client.complete({"prompt": prompt})
            assert answer.is_ok
            assert answer.body == b'{"prompt":"%b"}' % prompt.encode()
            assert answer.sent <= answer.ended
            assert answer.headers["number"] == "1"
        answers = await asyncio.gather(*(client.complete(b"%d" % i) for i in range(5)))
        assert [answer.body for answer in answers] == [b"%d" % i for i in range(5)]
        assert {answer.headers["number"] for answer in answers} == set("12345")
        small = Client(client.host, client.port, receive_buffer=2048)
        assert (await small.complete(b"x" * 300_000)).body == b"x" * 300_000
        small.close()

    assert with_server(echo, use) == 6


def test_a_cancelled_request_closes_its_connection() -> None:
    async def use(client: Client) -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(client.complete({}, on_data=lambda _: begun.set()))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        answer = await client.complete({}, on_data=Connection.close)  # over another: closing at the first byte ends it
        assert (answer.status, answer.is_done, answer.is_ok) == (200, False, False)

    assert with_server(stream_forever, use) == 2
