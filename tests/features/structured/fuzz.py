"""Thousands of hostile wishes against a server of the demo model, and beside them a client that only wants its answers.

    python -m tests.features.structured.fuzz [--count 5000] [--seed 1] [--attackers 4]

Every answer must have status 200 or 400, the server must be there at the end, and its memory must not grow. What the other client
gets is measured alone, beside as many plain requests, and beside the hostile ones.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any

from tests.features.structured.hostile import drawn
from tests.serve.server.foreign.launch import Server

GOOD: dict[str, Any] = {"prompt": "def binary_search(", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
SECONDS = 15
"""Of each measurement."""


def post(port: int, body: bytes, host: str) -> tuple[int, bytes]:
    """One request from an address of this machine: who comes from another is another client."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120, source_address=(host, 0))
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def good_rate(port: int, goes_on: Callable[[], bool]) -> tuple[float, float]:
    """Requests per second of a client with two at a time, and its slowest in seconds."""
    times: list[float] = []
    body = json.dumps(GOOD).encode()

    def ask() -> None:
        while goes_on():
            start = time.perf_counter()
            status, answer = post(port, body, "127.0.0.2")
            assert status == 200, answer
            times.append(time.perf_counter() - start)

    start = time.perf_counter()
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(times) / (time.perf_counter() - start), max(times)


def in_time() -> Callable[[], bool]:
    end = time.monotonic() + SECONDS
    return lambda: time.monotonic() < end


class Attack:
    """Sends wishes from several threads until all are answered.

    Args:
        bodies: of the requests. They are made before, so that this takes nobody's time now.
    """

    def __init__(self, port: int, num_threads: int, bodies: Iterable[bytes]):
        self.port = port
        self.bodies = enumerate(bodies)
        self.statuses: Counter[int] = Counter()
        self.wrong: list[tuple[int, int, str]] = []
        self.slowest = (0.0, -1)
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self._go) for _ in range(num_threads)]
        for thread in self.threads:
            thread.start()

    def _go(self) -> None:
        while True:
            with self.lock:
                number, wish = next(self.bodies, (-1, b""))
            if number < 0:
                return
            start = time.perf_counter()
            try:
                status, body = post(self.port, wish, "127.0.0.1")
            except OSError as error:
                status, body = 0, repr(error).encode()
            with self.lock:
                self.statuses[status] += 1
                self.slowest = max(self.slowest, (time.perf_counter() - start, number))
                if status not in (200, 400):
                    self.wrong.append((number, status, body.decode()[:300]))

    @property
    def is_running(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    def stop(self) -> None:
        with self.lock:
            self.bodies = enumerate(())
        for thread in self.threads:
            thread.join()


def memory(pid: int) -> float:
    """MiB of a process and those that it has started."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if pid in (parent, int(folder.name)):
                total += int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total / (1 << 20)


def wish(seed: int, number: int) -> dict[str, Any]:
    rng = random.Random(f"{seed} {number}")
    return {"prompt": "x = ", "max_tokens": rng.choice([1, 8, 32]), "seed": number, **drawn(rng)}


def main() -> int:
    parser = argparse.ArgumentParser()
    for name, default in (("count", 5000), ("seed", 1), ("attackers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    own = parser.parse_args()
    bodies = [json.dumps(wish(own.seed, number)).encode() for number in range(own.count)]
    with Server("demo", ["--no-access-log"]) as server:
        port = int(server.url.rpartition(":")[2])
        post(port, b'{"prompt": "a", "structured_outputs": {"regex": "a"}}', "127.0.0.1")
        good_rate(port, in_time())
        alone = [good_rate(port, in_time()) for _ in range(2)]
        plain = Attack(port, own.attackers, repeat(json.dumps({**GOOD, "prompt": "x = ", "max_tokens": 8}).encode()))
        beside_plain = good_rate(port, in_time())
        plain.stop()
        before, start = memory(server.process.pid), time.perf_counter()
        attack = Attack(port, own.attackers, bodies)
        sizes: list[float] = []
        rates: list[tuple[float, float]] = []
        while attack.is_running:
            rates.append(good_rate(port, in_time()))
            sizes.append(memory(server.process.pid))
            print(
                f"  {sum(attack.statuses.values())} answered, {rates[-1][0]:.1f} requests/s, {sizes[-1]:.0f} MiB",
                flush=True,
            )
        seconds = time.perf_counter() - start
        again = good_rate(port, in_time())
        is_alive = server.process.poll() is None
    mean = sum(rate for rate, _ in rates) / len(rates)
    print(f"{own.count} hostile requests in {seconds:.0f} s: {dict(attack.statuses)}; slowest {attack.slowest}")
    print(f"good client, requests/s and slowest: alone {alone}, beside plain requests {beside_plain}, after {again}")
    print(
        f"beside hostile ones: mean {mean:.1f} requests/s, least {min(rates)}, slowest {max(slow for _, slow in rates):.2f} s"
    )
    print(f"memory in MiB: {before:.0f} before, then {[round(size) for size in sizes]}")
    for number, status, body in attack.wrong[:20]:
        print(f"wrong: number {number}, status {status}: {body}")
    return int(bool(attack.wrong) or not is_alive)


if __name__ == "__main__":
    raise SystemExit(main())
