"""Streams as they arrive: any cut of the bytes gives the same events, and each chunk is whole JSON of the expected shape."""

from __future__ import annotations

import json
import random

import pytest

from tests.serve.server.events import DONE, EventReader, read_events
from tests.serve.server.running import Server, body_of, post_bytes, read_all

TEXT = 'line\nfeed "quoted" \\ 🦜 \u2028 data: [DONE]\n\ndata: {}'
CHAT = {"messages": [{"role": "user", "content": TEXT}]}


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": TEXT}), ("/v1/chat/completions", CHAT)])
def test_however_the_bytes_are_cut_the_events_are_the_same(parrot: Server, path: str, body: dict[str, object]) -> None:
    data = post_bytes(path, body | {"max_tokens": 60, "stream": True, "n": 2}, "connection: close\r\n")
    answer = read_all(parrot.connect(data), size=1)
    assert b"cache-control: no-cache\r\nx-accel-buffering: no\r\n" in answer, "no proxy holds it back"
    stream = body_of(answer)
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
