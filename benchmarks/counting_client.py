"""A client of many streams that costs as little as Python can: it receives, counts the ends of events, and keeps the times.

It runs on the cores of the server that it measures, and takes them from it: `Streams.cpu_seconds` says for how long.
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

RECEIVE_BYTES = 1 << 13
"""A longer buffer is mapped anew by the system each time, which costs more than all the rest."""

END_OF_EVENT = b"}\n\n"


@dataclass(slots=True)
class Stream:
    """One answer."""

    connection: socket.socket
    num_events: int = 0
    first: float = 0.0  # when its first event came
    last: float = 0.0
    tail: bytes = b""  # where an end of an event may begin


@dataclass(slots=True)
class Streams:
    """What came back of all requests."""

    seconds: float
    cpu_seconds: float  # of this process
    num_events: int
    ttft: list[float]
    itl: list[float]  # means, one for each stream


def stream_all(host: str, port: int, bodies: Sequence[Mapping[str, Any]], path: str = "/v1/completions") -> Streams:
    """Send all requests at once, each on a connection of its own, and read their streams to the end.

    Raises:
        OSError: an answer is an error.
    """
    streams: dict[int, Stream] = {}
    poll = select.epoll()
    for _ in bodies:
        connection = socket.create_connection((host, port))
        streams[connection.fileno()] = Stream(connection)
        poll.register(connection, select.EPOLLIN)
    cpu, start = process_time(), perf_counter()
    for stream, body in zip(streams.values(), bodies, strict=True):
        data = json.dumps(body, separators=(",", ":")).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        stream.connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    num_open = len(streams)
    while num_open:
        ready = poll.poll()
        now = perf_counter()
        for number, _ in ready:
            stream = streams[number]
            data = stream.connection.recv(RECEIVE_BYTES)
            if not data:
                stream.connection.close()
                num_open -= 1
                continue
            if not stream.tail and not data.startswith(b"HTTP/1.1 200"):
                raise OSError(f"the server refused: {data[:1000].decode(errors='replace')}")
            data = stream.tail + data
            if count := data.count(END_OF_EVENT):
                stream.num_events += count
                stream.first = stream.first or now
                stream.last = now
            stream.tail = data[1 - len(END_OF_EVENT) :]
    seconds, cpu = perf_counter() - start, process_time() - cpu
    poll.close()
    done = streams.values()
    return Streams(
        seconds,
        cpu,
        sum(stream.num_events for stream in done),
        [stream.first - start for stream in done],
        [(stream.last - stream.first) / max(1, stream.num_events - 1) for stream in done],
    )
