"""Hostile wishes for structured outputs are answered with 200 or 400, and the server goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanoengine.builder import build_engine, read_config
from tests.features.structured.hostile import wish
from tests.serve.server.running import Answer, Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(build_engine(read_config("demo", {"device": "cpu", "num_kv_blocks": 600}), use_tqdm=False), "demo")
    yield server
    server.close()


def test_hostile_wishes_are_refused_by_name_or_granted(server: Server) -> None:
    plain = {"prompt": "def f", "max_tokens": 8, "seed": 1}
    expected = server.post("/v1/completions", plain).json["choices"]

    def ask(number: int) -> Answer:
        return server.post("/v1/completions", wish(7, number))

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask, range(60)))
    seen = Counter(answer.status for answer in answers)
    assert set(seen) == {200, 400}, [own.body for own in answers if own.status not in (200, 400)]
    assert all(len(own.error["message"]) < 2000 for own in answers if own.status == 400)
    assert server.post("/v1/completions", plain).json["choices"] == expected
    server.check_idle()
