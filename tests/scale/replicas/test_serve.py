"""A server over two replicas: one address, the same API, and clients that notice nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from nanoengine.builder import build_engine, read_config
from nanoengine.scale.replicas.engine import ReplicatedEngine

pytest.importorskip("uvicorn")

from tests.serve.server.running import JSON, Server, until

BODY = {"prompt": "def binary_search(", "max_tokens": 60, "seed": 5, "stream": True, "logprobs": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = {"replicas": 2, "num_kv_blocks": 200, "num_threads": 1, "device": "cpu"}
    own = Server(build_engine(read_config("demo", options), False))
    yield own
    own.close()


def replicas(server: Server) -> set[int]:
    """The processes of the replicas that accept requests."""
    engine = server.serving.engine.engine
    assert isinstance(engine, ReplicatedEngine)
    return {process.started.process.pid for process in engine.supervisor.current}  # type: ignore[attr-defined]


def stream(server: Server, kill_at: int | None = None) -> tuple[str, list[Any]]:
    """The text and the log probabilities of a stream; at some chunk all replicas are killed."""
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(BODY).encode(), JSON)
    choices: list[Any] = []
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                choices += json.loads(line[6:])["choices"]
                for pid in replicas(server) if len(choices) == kill_at else ():
                    os.kill(pid, signal.SIGKILL)
    logprobs = [logprob for choice in choices for logprob in choice["logprobs"]["token_logprobs"]]
    return "".join(choice["text"] for choice in choices), logprobs


def test_a_client_sees_the_undisturbed_stream(server: Server) -> None:
    want = stream(server)
    assert len(want[1]) == 60
    assert stream(server, kill_at=7) == want
    until(lambda: len(replicas(server)) == 2)
    old = replicas(server)
    assert server.request("POST", "/restart_replicas").json == {"success": True, "restarting": 2}
    while old & replicas(server):
        assert stream(server) == want, "in the middle of a rolling restart"


def test_metrics_by_replica_and_summed(server: Server) -> None:
    by_replica, summed = (server.get(path).body.decode() for path in ("/metrics", "/metrics?engine=all"))
    name = "vllm:num_requests_running"
    assert re.findall(rf'{name}{{engine="(\w+)"', by_replica) == ["0", "1"]
    assert re.findall(rf'{name}{{engine="(\w+)"', summed) == ["all"]
    assert by_replica.count("vllm:admission_rejections_total{") == summed.count("vllm:admission_rejections_total{") == 2
    until(lambda: server.get("/view").json["pool"]["num_blocks"] == 400)  # of both, once both are there again
    assert server.get("/health").status == 200
