"""Behind Ray Serve, and as `nanoengine serve --ray`: what clients get when engines are killed. Skipped without Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nanoengine import LLM
from nanoengine.scale.ray import deployment

from .cluster import OPTIONS, ROOT, cluster, needs_ray, pids_of, wait_for

needs_ray()

PROMPT = "def binary_search("
BODY = {"model": "demo", "prompt": PROMPT, "max_tokens": 120, "seed": 5, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[Any]:
    with cluster() as own:
        yield own


@pytest.fixture(scope="module")
def want() -> str:
    with LLM("demo", use_tqdm=False, **OPTIONS) as llm:
        params = replace(llm.get_default_sampling_params(), seed=5, max_tokens=120, ignore_eos=True)
        return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


def stream(url: str, kill_at: int | None = None) -> str:
    """The text of a stream; at some chunk every engine is killed."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(BODY).encode(), headers)
    text, count = "", 0
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            text += json.loads(line[6:])["choices"][0]["text"]
            count += 1
            if count == kill_at:
                for pid in pids_of("RayReplica"):
                    os.kill(pid, signal.SIGKILL)
    return text


def test_a_deployment_of_ray_serve(want: str) -> None:
    needs_ray("ray.serve")
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        serve.start(http_options={"port": port})
        serve.run(deployment("demo", replicas=2, **OPTIONS), name="n")
        assert len(pids_of("RayReplica")) == 2
        url = f"http://127.0.0.1:{port}"
        assert stream(url) == want
        assert stream(url, kill_at=10) == want
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            assert json.load(answer)["data"][0]["id"] == "demo"
    finally:
        serve.shutdown()
    wait_for(lambda: not pids_of("RayReplica"))


def test_the_command(nodes: Any, want: str) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    command = [sys.executable, "-m", "nanoengine", "serve", "demo", "--port=0", "--ray", "--replicas=2", *options]
    command += [f"--ray-address={nodes.address}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        url = next((match[0] for line in process.stderr if (match := re.search(r"http://127\S+", line))), None)
        assert url is not None
        assert stream(url, kill_at=10) == want
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    wait_for(lambda: not pids_of("RayReplica"))
