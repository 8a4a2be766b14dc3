"""What a rude client costs everybody else: it sends one kind of request again and again, on several connections (Linux).

Meanwhile another client, from an address of its own, has a chat of 16 tokens answered, again and again, and `/health` is asked
for every few milliseconds. `chat_ms` and `chat_ms_p90` are what the chat takes, `first_ms` its first token, `chat_ratio` and
`chat_ratio_p90` how many times as long as alone; `nobody_ratio` the same while the rude client talks to nobody, from a process
that wants a CPU all the time. `health_ms` is the longest answer of `/health`, `memory_mib` what the server has taken meanwhile.
The statuses that the rude client gets stand beside it. Every attack is bounded in bytes, connections and time.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.load import ServerProcess, serving
from benchmarks.neighbours import Neighbours
from benchmarks.options import positive_float
from benchmarks.report import Report

RUDE = "127.0.0.2"
"""The rude client's address: without keys, each is a client."""

TOKENS = 16
"""Of the other client's chat."""

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "a"}


class Attack(NamedTuple):
    """A request that is sent again and again on some connections.

    Attributes:
        is_fresh: the body is made anew for each, so that nothing of it is in a cache.
        hangs_up: when the first piece of the answer is there.
    """

    num_connections: int
    path: str
    body: Callable[[], bytes]
    is_fresh: bool = False
    hangs_up: bool = False


def _body(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(fields, separators=(",", ":")).encode()


COMPLETIONS, LONG = "/v1/completions", 3_900


def _ids(count: int) -> list[int]:
    return [random.randrange(5, 250) for _ in range(count)]


def _fresh(num_connections: int, path: str, fields: Callable[[], dict[str, Any]], **options: Any) -> Attack:
    return Attack(num_connections, path, lambda: json.dumps(fields()).encode(), True, **options)


def _rows(count: int, **fields: Any) -> Attack:
    return Attack(4, COMPLETIONS, _body(prompt="a", n=count, max_tokens=300, ignore_eos=True, **fields))


ATTACKS = {
    "long prompts": _fresh(8, COMPLETIONS, lambda: {"prompt": _ids(LONG), "max_tokens": 1}),
    "one long prompt": _fresh(1, COMPLETIONS, lambda: {"prompt": _ids(LONG), "max_tokens": 1}),
    "log probabilities of prompts": _fresh(
        4, COMPLETIONS, lambda: {"prompt": _ids(LONG), "max_tokens": 1, "prompt_logprobs": 20}
    ),
    "few of prompts": _fresh(1, COMPLETIONS, lambda: {"prompt": _ids(LONG), "max_tokens": 1, "prompt_logprobs": 1}),
    "many prompts": _fresh(4, COMPLETIONS, lambda: {"prompt": [_ids(20) for _ in range(1024)], "max_tokens": 4}),
    "echo of many": _fresh(4, COMPLETIONS, lambda: {"prompt": _ids(3_000), "n": 128, "echo": True, "max_tokens": 1}),
    "many rows": _rows(64),
    "many rows of one": _rows(64)._replace(num_connections=1),
    "rows with log probabilities": _rows(32, logprobs=20),
    "rows under a schema": _rows(64, structured_outputs={"json": {"type": "array", "items": {"type": "integer"}}}),
    "long constants": _fresh(4, COMPLETIONS, lambda: _long({"json": {"const": _text(100_000)}})),
    "long choices": _fresh(4, COMPLETIONS, lambda: _long({"choice": [_text(250_000), _text(250_000)]})),
    "new patterns": _fresh(
        4, COMPLETIONS, lambda: {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": _pattern()}}
    ),
    "embeddings": _fresh(4, "/v1/embeddings", lambda: {"input": [_ids(300) for _ in range(64)]}),
    "small chats": Attack(32, CHAT, _body(messages=[USER], max_tokens=16)),
    "responses": Attack(4, RESPONSES, _body(input="a", max_output_tokens=64)),
    "streams that hang up": Attack(
        8, COMPLETIONS, _body(prompt="a", n=8, max_tokens=400, ignore_eos=True, stream=True), hangs_up=True
    ),
    "refused chats": Attack(4, CHAT, _body(messages=[USER], temperature="hot", user="a" * (1 << 20))),
    "refused ids": Attack(8, "/detokenize", _body(tokens=[7] * 1_500_000)),
    "ignored bytes": Attack(4, COMPLETIONS, _body(prompt="a", max_tokens=1, metadata={"a": "b" * 7_900_000})),
}
"""Requests for much work, or for little work in a costly way; `tests/serve/server/test_growth.py` counts that of long lists."""


def _long(outputs: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": "a", "n": 16, "max_tokens": 64, "structured_outputs": outputs}


def _text(count: int) -> str:
    return "".join(f"{random.getrandbits(40):010x}" for _ in range(count // 10))


def _pattern() -> str:
    return "(" + "|".join(f"{random.getrandbits(60):x}[a-z]{{1,40}}" for _ in range(40)) + ")"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help="(default: all) " + "; ".join(ATTACKS))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seconds", type=positive_float, default=5.0, help="of each attack (default: 5)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON here too")


def run(args: argparse.Namespace, report: Report) -> None:
    asyncio.run(_run(args, report))


async def _run(args: argparse.Namespace, report: Report) -> None:
    nobody = 1.0
    for name in ["none", *(args.attacks or ATTACKS)]:
        async with serving(args.model, {"access_log": False, "device": "cpu"}) as server:
            if name == "none":
                nobody = await asyncio.to_thread(_beside_nobody, server, args.seconds)
            figures, statuses = await asyncio.to_thread(_attacked, server, name, args.seconds)
        figures["nobody_ratio"] = nobody
        report.add({"attack": name, "told": ", ".join(map(str, sorted(statuses)))}, figures)
        shown = ", ".join(f"{key} {value:.3g}" for key, value in figures.items())
        print(f"{name}: {shown}", flush=True)


def _beside_nobody(server: ServerProcess, seconds: float) -> float:
    """How many times as long as alone a chat takes beside a process that wants a CPU all the time."""
    alone = _measure(server, seconds)["chat_ms"]
    with Neighbours(1) as neighbours, neighbours.let_loose():
        return _measure(server, seconds)["chat_ms"] / alone


def _attacked(server: ServerProcess, name: str, seconds: float) -> tuple[dict[str, float], Counter[int]]:
    _measure(server, 0.5)
    alone = _measure(server, seconds)
    before, statuses = server.resident_bytes(), Counter[int]()
    processes = multiprocessing.get_context("spawn")  # the attackers' threads must not hold up those that measure
    over, counts = processes.Event(), processes.SimpleQueue()
    rude = processes.Process(target=_attack, args=(server.port, name, over, counts, seconds))
    if name != "none":
        rude.start()
        counts.get()  # they have begun
    try:
        figures = _measure(server, seconds)
    finally:
        over.set()
    if name != "none":
        statuses = counts.get()
        rude.join()
    for key in ("chat_ms", "chat_ms_p90", "first_ms"):
        figures[key.replace("_ms", "_ratio")] = figures[key] / alone[key]
    return figures | {"memory_mib": (server.resident_bytes() - before) / (1 << 20)}, statuses


def _attack(port: int, name: str, over: Any, counts: Any, seconds: float) -> None:
    """The process of the rude client."""
    attack, statuses = ATTACKS[name], Counter[int]()
    args = (port, attack, attack.body(), statuses, over, seconds)
    threads = [threading.Thread(target=_send, args=args) for _ in range(attack.num_connections)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    counts.put(None)
    for thread in threads:
        thread.join()
    counts.put(statuses)


def _send(port: int, attack: Attack, body: bytes, statuses: Counter[int], over: Any, seconds: float) -> None:
    while not over.is_set():
        try:
            statuses[_ask(port, attack.path, body, RUDE, seconds + 30, hangs_up=attack.hangs_up)] += 1
        except (OSError, http.client.HTTPException):
            statuses[0] += 1
            over.wait(0.1)
        if attack.is_fresh:
            body = attack.body()


def _ask(
    port: int,
    path: str,
    body: bytes,
    address: str,
    timeout: float,
    times: list[float] | None = None,
    *,
    hangs_up: bool = False,
) -> int:
    """The status of an answer, which is read to its end unless the client hangs up.

    Args:
        times: gets the seconds to the first piece of the answer, and to its end.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout, source_address=(address, 0))
    start = time.perf_counter()
    try:
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        connection.request("POST" if body else "GET", path, body or None, headers if body else {})
        answer = connection.getresponse()
        first = answer.read1(1 << 16)
        took = time.perf_counter() - start
        while first and not hangs_up and answer.read(1 << 20):
            pass
        if times is not None:
            times += [took, time.perf_counter() - start]
        return answer.status
    finally:
        connection.close()


def _measure(server: ServerProcess, seconds: float) -> dict[str, float]:
    times: list[float] = []
    health, over = [0.0], threading.Event()

    def probe() -> None:
        while not over.wait(0.005):
            health[0] = max(health[0], _timed(server.port, "/health", b"")[1])

    prober = threading.Thread(target=probe)
    prober.start()
    chat = {"messages": [USER], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    body = json.dumps(chat).encode()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        times += _timed(server.port, CHAT, body)
        time.sleep(0.02)
    over.set()
    prober.join()
    firsts, wholes = times[::2], times[1::2]
    found = {"chat_ms": median(wholes), "chat_ms_p90": _p90(wholes), "first_ms": median(firsts), "health_ms": health[0]}
    return {name: 1e3 * value for name, value in found.items()}


def _p90(values: list[float]) -> float:
    return sorted(values)[int(0.9 * len(values))]


def _timed(port: int, path: str, body: bytes) -> list[float]:
    """Seconds to the first piece and to the end."""
    times: list[float] = []
    status = _ask(port, path, body, "127.0.0.1", 120, times=times)
    assert status == 200, f"{path} was answered with {status}"
    return times
