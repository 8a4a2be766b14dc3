"""`nanoengine serve demo --replicas 2`: one address, the same API, and clients that notice nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scale.seen import children

pytest.importorskip("uvicorn")

BODY = {"prompt": "def binary_search(", "max_tokens": 60, "seed": 5, "stream": True, "logprobs": 1, "ignore_eos": True}


class Server:
    def __init__(self, *options: str):
        command = [sys.executable, "-m", "nanoengine", "serve", "demo", "--port", "0", "--num-threads", "1", *options]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if (found := re.search(r"http://\S+", line)) is not None:
                self.url = found[0]
                return
        raise AssertionError("the server did not start")

    def replicas(self) -> list[int]:
        return children(self.process.pid, "replicas.process")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path) as answer:
            return str(answer.read().decode())

    def stream(self, kill_at: tuple[int, ...] = ()) -> tuple[str, list[Any]]:
        """The text and the log probabilities of a stream; at some chunks a replica is killed."""
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(BODY).encode(), headers)
        text, logprobs, count = "", [], 0
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                [choice] = json.loads(line[6:])["choices"]
                text += choice["text"]
                logprobs += choice["logprobs"]["token_logprobs"]
                count += 1
                if count in kill_at:
                    for pid in self.replicas():
                        os.kill(pid, signal.SIGKILL)
        return text, logprobs


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    own = Server("--replicas", "2", "--num-kv-blocks", "200")
    yield own
    own.process.send_signal(signal.SIGTERM)
    assert own.process.wait(30) == 0


def test_a_client_sees_the_undisturbed_stream(server: Server) -> None:
    want = server.stream()
    assert len(want[1]) == 60
    assert server.stream(kill_at=(7,)) == want, "all replicas are killed"
    old = set(server.replicas())
    assert len(old) == 2
    post = urllib.request.Request(f"{server.url}/restart_replicas", b"", method="POST")
    with urllib.request.urlopen(post) as answer:
        assert json.load(answer) == {"success": True, "restarting": 2}
    while old & set(server.replicas()):
        assert server.stream() == want, "in the middle of a rolling restart"


def test_metrics_by_replica_and_summed(server: Server) -> None:
    by_replica, summed = server.get("/metrics"), server.get("/metrics?engine=all")
    name = "vllm:num_requests_running"
    assert re.findall(rf'{name}{{engine="(\w+)"', by_replica) == ["0", "1"]
    assert re.findall(rf'{name}{{engine="(\w+)"', summed) == ["all"]
    assert by_replica.count("vllm:admission_rejections_total{") == summed.count("vllm:admission_rejections_total{") == 2
    end = time.monotonic() + 30
    while json.loads(server.get("/view"))["pool"]["num_blocks"] != 400:  # of both, once both are there again
        assert time.monotonic() < end
        time.sleep(0.1)
    assert server.get("/health") == ""
