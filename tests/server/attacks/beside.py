"""What rude clients cost a well-behaved one: `python -m tests.server.attacks.beside [ATTACK...]`. By hand: it takes some minutes.

Starts `nanoengine serve demo` with two keys on a free port of 127.0.0.1. One client streams short answers, at first alone, then
beside each attack. The table says how long its first token took (median and longest), the longest answer of /health, what the
attacker was told, and how much memory the server has taken since it started. Every attack is bounded in bytes, connections and
time.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

SECONDS = 8.0
"""Of each attack."""

NESTED = b"[" + b",".join([b"[[[[]]]]"] * 100_000) + b"]"
TEXT = "a function of two words, and others\n" * 29_000  # 1 MiB


class Attack(NamedTuple):
    """A request that is sent again and again on some connections; without a body it is a GET."""

    num_connections: int
    path: str
    body: bytes | None = None


def _body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


CHAT = "/v1/chat/completions"
ATTACKS = {
    "rows": Attack(2, "/v1/completions", _body(prompt="a", n=128, max_tokens=400, ignore_eos=True)),
    "priority": Attack(2, "/v1/completions", _body(prompt="a", n=128, max_tokens=400, priority=-(2**63))),
    "echo": Attack(1, "/v1/completions", _body(prompt=TEXT * 7, n=128, echo=True, truncate_prompt_tokens=10)),
    "echo, streamed": Attack(
        1, "/v1/completions", _body(prompt=TEXT[:400_000], n=128, echo=True, truncate_prompt_tokens=10, stream=True)
    ),
    "prompt_logprobs": Attack(2, "/v1/completions", _body(prompt=[5] * 900, prompt_logprobs=20, max_tokens=1)),
    "logprobs": Attack(1, "/v1/completions", _body(prompt="a", n=128, logprobs=20, max_tokens=400, ignore_eos=True)),
    "role": Attack(
        1,
        CHAT,
        _body(
            messages=[{"role": "r" * (1 << 20), "content": "a"}],
            n=128,
            add_generation_prompt=False,
            truncate_prompt_tokens=10,
        ),
    ),
    "tokenize": Attack(16, "/tokenize", _body(prompt=TEXT[: 1 << 20])),
    "ignored field": Attack(2, "/v1/completions", b'{"prompt":"a","max_tokens":1,"metadata":' + NESTED + b"}"),
    "built field": Attack(2, CHAT, b'{"messages":[{"role":"user","content":' + NESTED[:1_800_000] + b"]}]}"),
    "metrics": Attack(24, "/metrics"),
    "stalled bodies": Attack(60, "/v1/completions", None),
}


class Server:
    """A server in a process of its own, its log in a file."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as own:
            self.port = own.getsockname()[1]
        command = ["-m", "nanoengine", "serve", "demo", "--port", str(self.port), "--no-access-log"]
        self.process = subprocess.Popen([sys.executable, *command, "--device", "cpu", "--api-key", "good", "rude"])
        while self.health() is None:
            time.sleep(0.2)

    def health(self) -> float | None:
        """Seconds until it says that it is well."""
        start = time.perf_counter()
        try:
            self.ask("GET", "/health", None, "good", timeout=60)
        except OSError:
            return None
        return time.perf_counter() - start

    def ask(self, method: str, path: str, body: bytes | None, key: str, timeout: float = SECONDS) -> int:
        """The status of an answer, which is read to its end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            while answer.read(1 << 20):
                pass
            return answer.status
        finally:
            connection.close()

    def first_token(self) -> float:
        """Seconds to the first token of the well-behaved client, who reads the rest, too."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        start = time.perf_counter()
        headers = {"content-type": "application/json", "authorization": "Bearer good"}
        connection.request("POST", "/v1/completions", _body(prompt="def f(", max_tokens=8, stream=True), headers)
        answer = connection.getresponse()
        answer.readline()
        found = time.perf_counter() - start
        assert answer.status == 200
        answer.read()
        connection.close()
        return found

    def memory(self) -> int:
        """MiB of it that are resident, the most there ever were."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) >> 10

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def _rude(server: Server, name: str, told: Counter[str], over: threading.Event) -> None:
    attack = ATTACKS[name]
    while not over.is_set():
        if name == "stalled bodies":
            with suppress(OSError), socket.create_connection(("127.0.0.1", server.port)) as connection:
                head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer rude\r\n"
                head += "content-type: application/json\r\ncontent-length: 8000000\r\n\r\n"
                connection.sendall(head.encode() + b" " * 7_900_000)
                connection.settimeout(SECONDS)
                told[connection.recv(12)[9:].decode()] += 1
            over.wait(0.5)
            continue
        method = "GET" if attack.body is None else "POST"
        try:
            status = server.ask(method, attack.path, attack.body, "rude")
        except (OSError, http.client.HTTPException):
            status = 0
        told[str(status or "hung up")] += 1
        if status not in (200, 0):
            over.wait(0.02)


def _measure(server: Server, seconds: float) -> tuple[list[float], float]:
    """First tokens, and the longest answer of /health."""
    firsts, worst, over = [], [0.0], threading.Event()

    def probe() -> None:
        while not over.wait(0.01):
            worst[0] = max(worst[0], server.health() or 0.0)

    prober = threading.Thread(target=probe)
    prober.start()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        firsts.append(server.first_token())
        time.sleep(0.05)
    over.set()
    prober.join()
    return firsts, worst[0]


def main(names: list[str]) -> None:
    print(f"{'attack':<18}{'first token, ms':>16}{'longest':>9}{'/health, longest':>18}{'memory, MiB':>13}  told")
    for name in ["alone", *(names or ATTACKS)]:
        server, told, over = Server(), Counter[str](), threading.Event()
        try:
            _measure(server, 2)
            before = server.memory()
            count = ATTACKS[name].num_connections if name in ATTACKS else 0
            rude = [threading.Thread(target=_rude, args=(server, name, told, over)) for _ in range(count)]
            for thread in rude:
                thread.start()
            time.sleep(0.5)
            firsts, worst = _measure(server, SECONDS)
            over.set()
            for thread in rude:
                thread.join()
            times = f"{median(firsts) * 1e3:16.0f}{max(firsts) * 1e3:9.0f}{worst * 1e3:18.0f}"
            print(f"{name:<18}{times}{'+' + str(server.memory() - before):>13}  {dict(told)}", flush=True)
        finally:
            over.set()
            server.close()


if __name__ == "__main__":
    main(sys.argv[1:])
