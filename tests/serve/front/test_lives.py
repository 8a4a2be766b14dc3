"""Drawn lives of a server of several models: clients request, hang up, load and unload, processes are killed, memory changes.
Every answer is that of its model, and nothing is left at the end.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nanoengine.serve.front import child as child_module
from nanoengine.serve.front import front as front_module
from nanoengine.serve.front import relay as relay_module
from nanoengine.serve.front.memory_plan import PROCESS_BYTES
from tests.serve.front.fronts import MIB, TOY, FrontOfToys
from tests.serve.server.running import post_bytes, until

NEED = PROCESS_BYTES + 100 * MIB
NAMES, PROMPTS, PATH = "abc", ("one", "one two three"), "/v1/completions"

CAN_FAIL = ("does not answer", "failed to load", "there is no room", "shutting down", "requests: try again")
"""Messages of requests that nobody could answer, such as those of a process that was killed."""


def outcome(body: bytes) -> str:
    """The text of an answer, whole or streamed, or the message of its error."""
    pieces = re.findall(r"^(?:data: )?(\w.*|\{.*)$", body.decode(), re.MULTILINE)
    tables = [json.loads(piece) for piece in pieces if piece.startswith("{")]
    if not tables:
        return "".join(pieces)
    return f"error: {tables[0]['error']['message']}" if "error" in tables[0] else str(tables[0]["prompt"])


class Life:
    """Clients of a server, in threads.

    Args:
        server: the server.
        seed: what is drawn depends on it and on the order of the threads.
    """

    def __init__(self, server: FrontOfToys, seed: int):
        self.server, self.seed = server, seed
        self.mistakes: list[str] = []
        self.num_answered = 0
        self.available = 3 * NEED
        server.front.loader._memory.available = lambda: self.available

    def run(self, num_steps: int, num_clients: int = 4) -> None:
        """A life, and its end: all models answer again, and nothing is left of requests and processes."""
        threads = [threading.Thread(target=self._live, args=(i, num_steps)) for i in range(num_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not self.mistakes, (self.seed, self.mistakes)
        self._check_end()

    def _live(self, number: int, num_steps: int) -> None:
        random = Random(f"{self.seed} {number}")
        steps = [self._request] * 12 + [self._hang_up] * 4 + [self._load, self._unload, self._kill, self._change_memory]
        try:
            for _ in range(num_steps):
                random.choice(steps)(random)
        except Exception as error:
            self.mistakes.append(f"client {number}: {error!r}")

    def _draw(self, random: Random) -> dict[str, Any]:
        keep_alive = {"keep_alive": random.choice([0, "10ms", -1])} if random.random() < 0.3 else {}
        stream = random.random() < 0.5
        return {"model": random.choice(NAMES), "prompt": random.choice(PROMPTS), "stream": stream, **keep_alive}

    def _request(self, random: Random) -> None:
        body = self._draw(random)
        try:
            answer = self.server.post(PATH, body)
        except (http.client.IncompleteRead, ConnectionError):
            return  # an answer whose process was killed, cut off
        text = outcome(answer.body)
        if text.replace(" ", "") == body["prompt"].replace(" ", ""):
            self.num_answered += 1
        elif not (text.startswith("error: ") and any(words in text for words in CAN_FAIL)):
            self.mistakes.append(f"{body}: {answer.status} {text!r}")

    def _hang_up(self, random: Random) -> None:
        """Somewhere in the request, while the answer is made, or in the middle of it."""
        data = post_bytes(PATH, self._draw(random))
        if random.random() < 0.3:
            data = data[: random.randrange(len(data))]
        with socket.create_connection(self.server.address, timeout=20) as connection:
            connection.sendall(data)
            time.sleep(random.choice([0, 0.01, 0.1]))
            if random.random() < 0.3:
                connection.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    connection.recv(random.choice([1, 100, 10_000]))

    def _load(self, random: Random, path: str = "/models/load") -> None:
        answer = self.server.post(path, {"model": random.choice(NAMES)})
        if answer.status != 200 and not any(words in answer.error["message"] for words in CAN_FAIL):
            self.mistakes.append(f"{path}: {answer}")

    def _unload(self, random: Random) -> None:
        self._load(random, "/models/unload")

    def _kill(self, random: Random) -> None:
        if children := list(self.server.front.loader.in_memory.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(children).pid, random.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGKILL]))

    def _change_memory(self, random: Random) -> None:
        self.available = int(random.choice([0.5, 1.5, 2.5, 3.5, 3.5]) * NEED)

    def _check_end(self) -> None:
        front = self.server.front
        until(lambda: not (front.jobs or front.bodies.total))
        until(lambda: not any(model.load or model.num_running for model in front.loader.models))
        self.available = 9 * NEED
        for name in NAMES:
            until(partial(self._answers, name))
            assert self.server.post("/models/unload", {"model": name}).status == 200
        assert not front.loader.in_memory

    def _answers(self, name: str) -> bool:
        """Whether a model answers; a process that was killed in the last steps may end now."""
        self.server.post("/models/load", {"model": name})  # without the pause after a failure
        return outcome(self.server.complete(name, "one", stream=True).body) == "one"


def children_of(pid: int) -> frozenset[int]:
    """The processes that a process has started, those that have ended and were not waited for too."""
    children: set[int] = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended since
            children |= set(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return frozenset(children)


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_their_models_and_nothing_is_left(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "COMMAND", TOY)
    monkeypatch.setattr(relay_module, "PING_SECONDS", 0.02)
    monkeypatch.setattr(front_module, "WATCH_SECONDS", 0.3)
    before, files = children_of(os.getpid()), len(os.listdir("/proc/self/fd"))
    server = FrontOfToys(dict.fromkeys(NAMES, "toy"), limits={"max_loaded_models": 3})
    try:
        life = Life(server, seed)
        life.run(12)
    finally:
        server.close()
    assert life.num_answered
    assert server.tasks_left == 0
    assert not (left := children_of(os.getpid()) - before), left
    assert not os.path.exists(server.front._folder.name)
    until(lambda: len(os.listdir("/proc/self/fd")) <= files)
