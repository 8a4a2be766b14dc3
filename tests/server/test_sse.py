"""Streams as they arrive: any cut of the bytes gives the same events, and each chunk is whole JSON of the expected shape."""

from __future__ import annotations

import json
import random

import pytest

from nanoengine.server.answers import Chunks, usage_json
from tests.server.events import DONE, EventReader, read_events
from tests.server.running import Server, body_of, post_bytes, read_all

TEXT = 'line\nfeed "quoted" \\ 🦜 \u2028 data: [DONE]\n\ndata: {}'
CHAT = {"messages": [{"role": "user", "content": TEXT}]}


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": TEXT}), ("/v1/chat/completions", CHAT)])
def test_however_the_bytes_are_cut_the_events_are_the_same(parrot: Server, path: str, body: dict[str, object]) -> None:
    data = post_bytes(path, body | {"max_tokens": 60, "stream": True, "n": 2}, "connection: close\r\n")
    stream = body_of(read_all(parrot.connect(data), size=1))
    whole = read_events(stream)
    rng = random.Random(1)
    for most in (1, 2, 7, 100):
        reader, events, rest = EventReader(), list[str](), stream
        while rest:
            size = rng.randint(1, most)
            events += reader.feed(rest[:size])
            rest = rest[size:]
        assert reader.is_between
        assert events.pop() == DONE
        assert [json.loads(event) for event in events] == whole
    assert len({event["id"] for event in whole}) == 1
    assert len({event["created"] for event in whole}) == 1
    assert {event["model"] for event in whole} == {"parrot"}


def test_every_event_is_one_line_of_json() -> None:
    chunks = Chunks({"id": 'a"\n', "model": "ü"}, "print")
    for data in (
        chunks.chunk(b'{"x":1}'),
        chunks.chunk(b'{"x":1}', usage_json(3, 4)),
        chunks.last(b'{"x":1}', b""),
        chunks.usage({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}),
    ):
        assert data.startswith(b"data: ")
        assert data.endswith(b"\n\n")
        assert data.count(b"\n") == 2
        event = json.loads(data[6:])
        assert (event["id"], event["model"]) == ('a"\n', "ü")
        if "usage" in event:
            assert event["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_no_proxy_holds_a_stream_back(parrot: Server) -> None:
    answer = parrot.complete("a", stream=True)
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["transfer-encoding"] == "chunked"
