"""A drawn life of a server of several models: clients request, hang up, load and unload, engines are killed, memory changes.

Many lives: `python -m tests.serve.front.lives 300` (or 100-300) over toy processes; with the path of a model behind it, over that
model and the demo twice.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from nanoengine.builder import build_engine, read_config
from nanoengine.serve.front import child as child_module
from nanoengine.serve.front import front as front_module
from nanoengine.serve.front import relay as relay_module
from nanoengine.serve.front.memory_plan import PROCESS_BYTES
from nanoengine.serve.server.serve import _defaults
from tests.serve.front.fronts import MIB, TOY, FrontOfToys
from tests.serve.front.interfaces import OF_REAL, OF_TOYS, Interface
from tests.serve.server.running import Server, post_bytes, until

NEED = PROCESS_BYTES + 100 * MIB
"""Bytes of a model that the tests make, as the front counts them; weights are some MiB more."""

CAN_FAIL = ("does not answer", "failed to load", "there is no room", "shutting down", "requests: try again")
"""Messages of requests that nobody could answer, such as those of an engine that was killed."""


Expected = Mapping[tuple[str, str, str], str]
"""The outcome of a model alone, by its name, a path and a prompt."""


class Life:
    """Clients of a server, in threads.

    Args:
        server: the server.
        interfaces: that clients use.
        expected: outcomes.
        seed: what is drawn depends on it and on the order of the threads.
    """

    def __init__(self, server: FrontOfToys, interfaces: Sequence[Interface], expected: Expected, seed: int):
        self.server, self.interfaces, self.expected, self.seed = server, interfaces, expected, seed
        self.names = sorted({name for name, _, _ in expected})
        self.prompts = sorted({prompt for _, _, prompt in expected})
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

    def _draw(self, random: Random) -> tuple[Interface, dict[str, Any], str]:
        name, interface = random.choice(self.names), random.choice(self.interfaces)
        prompt = random.choice(self.prompts)
        body = interface.body(name, prompt, stream=random.random() < 0.5)
        if (interface in OF_TOYS or interface.path.startswith("/api/")) and random.random() < 0.3:  # others refuse it
            body["keep_alive"] = random.choice([0, "10ms", -1])
        return interface, body, self.expected[name, interface.path, prompt]

    def _request(self, random: Random) -> None:
        interface, body, expected = self._draw(random)
        try:
            answer = self.server.post(interface.path, body)
        except (http.client.IncompleteRead, ConnectionError):
            return  # an answer whose engine was killed, cut off
        outcome = interface.outcome(answer.body)
        if outcome == expected:
            self.num_answered += 1
        elif not (outcome.startswith("error: ") and any(text in outcome for text in CAN_FAIL)):
            self.mistakes.append(f"{body}: {answer.status} {outcome!r} in place of {expected!r}")

    def _hang_up(self, random: Random) -> None:
        """Somewhere in the request, while the answer is made, or in the middle of it."""
        interface, body, _ = self._draw(random)
        data = post_bytes(interface.path, body)
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
        answer = self.server.post(path, {"model": random.choice(self.names)})
        if answer.status != 200 and not any(text in answer.error["message"] for text in CAN_FAIL):
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
        until(lambda: not front.jobs)
        until(lambda: not any(model.load for model in front.loader.models))
        until(lambda: not front.bodies.total)
        until(lambda: not any(model.num_running for model in front.loader.models))
        self.available = 9 * NEED
        for name in self.names:
            for interface in self.interfaces:
                until(partial(self._answers, name, interface))
        for name in self.names:
            assert self.server.post("/models/unload", {"model": name}).status == 200
        assert not front.loader.in_memory

    def _answers(self, name: str, interface: Interface) -> bool:
        """Whether a model answers; a process that was killed in the last steps may end now."""
        prompt = self.prompts[0]
        self.server.post("/models/load", {"model": name})  # without the pause after a failure
        outcome = interface.outcome(self.server.post(interface.path, interface.body(name, prompt, stream=True)).body)
        return outcome == self.expected[name, interface.path, prompt]


def live(
    models: Mapping[str, str],
    interfaces: Sequence[Interface],
    expected: Expected,
    seed: int,
    num_steps: int,
    options: Mapping[str, Any] | None = None,
) -> int:
    """One life over a new server, of which nothing may be left. Returns the number of requests that were answered."""
    before, files = children_of(os.getpid()), len(os.listdir("/proc/self/fd"))
    server = FrontOfToys(models, limits={"max_loaded_models": 3}, options=options)
    try:
        life = Life(server, interfaces, expected, seed)
        life.run(num_steps)
    finally:
        server.close()
    assert server.tasks_left == 0
    assert not (left := children_of(os.getpid()) - before), left
    assert not os.path.exists(server.front._folder.name)
    until(lambda: len(os.listdir("/proc/self/fd")) <= files)
    return life.num_answered


def children_of(pid: int) -> frozenset[int]:
    """The processes that a process has started, those that have ended and were not waited for too."""
    children: set[int] = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended since
            children |= set(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return frozenset(children)


OPTIONS = {"device": "cpu", "num_threads": 1, "kv_cache_memory": 100 * MIB}
PROMPTS = ("def binary_search(", "Say yes.")


def outcomes_alone(models: Mapping[str, str]) -> Expected:
    """What each model answers alone, in the server of one model."""
    expected: dict[tuple[str, str, str], str] = {}
    for model in set(models.values()):
        names = [name for name, own in models.items() if own == model]
        built = build_engine(read_config(model, _defaults(OPTIONS) | OPTIONS), use_tqdm=False)
        alone = Server(built, names[0])
        try:
            for interface, prompt in product(OF_REAL, PROMPTS):
                answer = alone.post(interface.path, interface.body(names[0], prompt, stream=False))
                outcome = interface.outcome(answer.body)
                expected |= {(name, interface.path, prompt): outcome for name in names}
        finally:
            alone.close()
    return expected


TOY_PROMPTS = ("one", "one two three")
TOYS: Expected = {
    (name, "/v1/completions", prompt): prompt.replace(" ", "") for name in "abc" for prompt in TOY_PROMPTS
}


def main() -> None:
    count, *third = sys.argv[1:]
    if third:
        models = {"one": "demo", "two": "demo", "three": third[0]}
        expected = outcomes_alone(models)
    else:
        child_module.COMMAND, relay_module.PING_SECONDS, front_module.WATCH_SECONDS = TOY, 0.02, 0.3  # type: ignore[assignment]
    first, _, last = count.rpartition("-")
    for seed in range(int(first or 0), int(last)):
        if third:
            print(seed, live(models, OF_REAL, expected, seed, 6, OPTIONS), flush=True)
        else:
            print(seed, live(dict.fromkeys("abc", "toy"), OF_TOYS, TOYS, seed, 12), flush=True)


if __name__ == "__main__":
    main()
