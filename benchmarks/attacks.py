"""What two rude clients cost everybody else: each sends one kind of request again and again, from an address of its own (Linux).

Meanwhile a third client has a short chat answered, again and again, and `/health` is asked for every few milliseconds.
`health_ms` is its longest answer, `chat_ms` the third client's median and `chat_max_ms` its longest, `memory_mib` what the
server has taken meanwhile. What the attackers were told stands beside it. Every attack is bounded in bytes, connections and time.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.load import ServerProcess, serving
from benchmarks.options import positive_float
from benchmarks.report import Report

RUDE = ("127.0.0.2", "127.0.0.3")
"""Addresses of the attackers: without keys, each is a client."""

NESTED = b"[" + b",".join([b"[[[[]]]]"] * 100_000) + b"]"
TEXT = "a function of two words, and others\n" * 29_000  # 1 MiB
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "a"}
DEEP = '{"type":"object","properties":{"a":' * 60 + "{}" + "}}" * 60


class Attack(NamedTuple):
    """A request that each attacker sends again and again on some connections; with an empty body it is a GET."""

    num_connections: int
    path: str
    body: Callable[[], bytes]


def _body(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(fields, separators=(",", ":")).encode()


def _many(path: str, name: str, item: Any, count: int, **fields: Any) -> Attack:
    """A field that is a list of so many items; a number in `item` counts them."""
    text = json.dumps(item, separators=(",", ":"))

    def body() -> bytes:
        items = ",".join(text.replace("NUMBER", str(number)) for number in range(count))
        head = json.dumps(fields, separators=(",", ":"))[:-1]
        return f'{head}{"," if fields else ""}"{name}":[{items}]}}'.encode()

    return Attack(1, path, body)


def _tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "fNUMBER", "parameters": parameters}}


WIDE = {f"key{number}": {"type": "string"} for number in range(40_000)}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": WIDE}}}
SAID = {"role": "assistant", "content": None, "tool_calls": [CALL] * 60_000}
PARTS = [{"type": "text", "text": "a"}] * 200_000

ATTACKS = {
    "rows": Attack(1, "/v1/completions", _body(prompt="a", n=128, max_tokens=400, ignore_eos=True)),
    "priority": Attack(1, "/v1/completions", _body(prompt="a", n=128, max_tokens=400, priority=-(2**63))),
    "echo": Attack(1, "/v1/completions", _body(prompt=TEXT * 7, n=128, echo=True, truncate_prompt_tokens=10)),
    "echo, streamed": Attack(
        1, "/v1/completions", _body(prompt=TEXT[:400_000], n=128, echo=True, truncate_prompt_tokens=10, stream=True)
    ),
    "prompt_logprobs": Attack(1, "/v1/completions", _body(prompt=[5] * 900, prompt_logprobs=20, max_tokens=1)),
    "logprobs": Attack(1, "/v1/completions", _body(prompt="a", n=128, logprobs=20, max_tokens=400, ignore_eos=True)),
    "tokenize": Attack(8, "/tokenize", _body(prompt=TEXT[: 1 << 20])),
    "detokenize": Attack(1, "/detokenize", _body(tokens=[7] * (1 << 20))),
    "ignored field": Attack(1, "/v1/completions", lambda: b'{"prompt":"a","max_tokens":1,"metadata":' + NESTED + b"}"),
    "nested content": Attack(1, CHAT, lambda: b'{"messages":[{"role":"user","content":' + NESTED[:1_800_000] + b"]}]}"),
    "metrics": Attack(12, "/metrics", lambda: b""),
    "stalled bodies": Attack(30, "/v1/completions", lambda: b" " * 7_900_000),
    # Lists and tables that are long, in every field that has some.
    "system messages": _many(MESSAGES, "messages", {"role": "system", "content": "a"}, 40_000, max_tokens=1),
    "system items": _many(RESPONSES, "input", {"role": "system", "content": "a"}, 40_000, max_output_tokens=1),
    "system, counted": _many(MESSAGES + "/count_tokens", "messages", {"role": "system", "content": "a"}, 40_000),
    "messages": _many(CHAT, "messages", USER, 200_000, max_tokens=1),
    "messages, Anthropic's": _many(MESSAGES, "messages", USER, 200_000, max_tokens=1),
    "messages, Ollama's": _many("/api/chat", "messages", USER, 200_000, model="demo"),
    "messages, tokenized": _many("/tokenize", "messages", USER, 200_000),
    "items": _many(RESPONSES, "input", USER, 200_000),
    "parts": Attack(1, CHAT, _body(messages=[{"role": "user", "content": PARTS}])),
    "parts, Anthropic's": Attack(1, MESSAGES, _body(messages=[{"role": "user", "content": PARTS}], max_tokens=1)),
    "calls of a message": Attack(1, CHAT, _body(messages=[USER, SAID])),
    "arguments of a call": Attack(
        1,
        CHAT,
        _body(
            messages=[USER, SAID | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": "[" * 4_000_000}}]}]
        ),
    ),
    "tools": _many(CHAT, "tools", _tool({}), 80_000, messages=[USER]),
    "a wide tool": _many(CHAT, "tools", _tool({"type": "object", "properties": WIDE}), 1, messages=[USER]),
    "a tool's long list": _many(CHAT, "tools", _tool({"enum": [1] * 2_000_000}), 1, messages=[USER]),
    "template arguments": Attack(1, CHAT, _body(messages=[USER], chat_template_kwargs={"a": [1] * 3_000_000})),
    "documents": _many(CHAT, "documents", {"text": "a"}, 200_000, messages=[USER]),
    "a wide schema": Attack(1, CHAT, _body(messages=[USER], response_format=FORMAT)),
    "a deep schema": Attack(
        1, CHAT, lambda: b'{"messages":[{"role":"user","content":"a"}],"json_schema":%b}' % DEEP.encode()
    ),
    "choices": Attack(
        1, CHAT, _body(messages=[USER], structured_outputs={"choice": [f"c{number}" for number in range(500_000)]})
    ),
    "ids": Attack(1, "/v1/completions", _body(prompt=[7] * (1 << 20), max_tokens=1)),
    "prompts": Attack(1, "/v1/completions", _body(prompt=["a"] * (1 << 20), max_tokens=1)),
    "lists of ids": Attack(1, "/v1/completions", _body(prompt=[[7, 8, 9] * 300] * 1024, max_tokens=1)),
    "allowed ids": Attack(1, "/v1/completions", _body(prompt="a", allowed_token_ids=[7] * (1 << 20), max_tokens=1)),
    "stop strings": Attack(1, "/v1/completions", _body(prompt="a", stop=["x" * 256] * 1024, max_tokens=1)),
    "bad words": Attack(1, "/v1/completions", _body(prompt="a", bad_words=["word " * 1000] * 1024, max_tokens=1)),
    "logit_bias": Attack(
        1, "/v1/completions", _body(prompt="a", logit_bias={str(number): 1 for number in range(1024)}, max_tokens=1)
    ),
    "inputs": Attack(1, "/v1/embeddings", _body(input=["a " * 200] * 1024)),
    "documents to rank": Attack(1, "/rerank", _body(query="a", documents=["a"] * 1_000_000)),
    "kept instructions": Attack(1, RESPONSES, _body(input="a", instructions=TEXT[: 1 << 19], max_output_tokens=1)),
    "ids to abort": Attack(1, "/abort_requests", _body(request_ids=["a"] * 1_000_000)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help="(default: all) " + "; ".join(ATTACKS))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seconds", type=positive_float, default=5.0, help="of each attack (default: 5)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON here too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib: the extra 'bench')")


def run(args: argparse.Namespace, report: Report) -> None:
    asyncio.run(_run(args, report))


async def _run(args: argparse.Namespace, report: Report) -> None:
    for name in ["none", *(args.attacks or ATTACKS)]:
        async with serving(args.model, {"access_log": False, "device": "cpu"}) as server:
            figures, told = await asyncio.to_thread(_attacked, server, name, args.seconds)
        report.add({"attack": name, "told": ", ".join(map(str, sorted(told)))}, figures)
        print(f"{name}: {figures}", flush=True)


def _attacked(server: ServerProcess, name: str, seconds: float) -> tuple[dict[str, float], Counter[int]]:
    _measure(server, 1.0)
    before, told = server.resident_bytes(), Counter[int]()
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
        told = counts.get()
        rude.join()
    return figures | {"memory_mib": (server.resident_bytes() - before) / (1 << 20)}, told


def _attack(port: int, name: str, over: Any, counts: Any, seconds: float) -> None:
    """The process of both attackers."""
    attack, told = ATTACKS[name], Counter[int]()
    args = (port, attack, attack.body(), told, over, seconds)
    threads = [
        threading.Thread(target=_send, args=(address, *args)) for address in RUDE for _ in range(attack.num_connections)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    counts.put(None)
    for thread in threads:
        thread.join()
    counts.put(told)


def _send(address: str, port: int, attack: Attack, body: bytes, told: Counter[int], over: Any, seconds: float) -> None:
    while not over.is_set():
        stalls = not body.strip() and bool(body)
        with suppress(OSError, http.client.HTTPException):
            told[_ask(port, attack.path, body, address, seconds + 30, missing=100 if stalls else 0)] += 1
            continue
        told[0] += 1
        over.wait(0.1)


def _ask(port: int, path: str, body: bytes, address: str, timeout: float, missing: int = 0) -> int:
    """The status of an answer, which is read to its end; of the body, so many bytes never come."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout, source_address=(address, 0))
    try:
        headers = {"content-type": "application/json", "content-length": str(len(body) + missing)}
        connection.request("POST" if body else "GET", path, body or None, headers if body else {})
        answer = connection.getresponse()
        while answer.read(1 << 20):
            pass
        return answer.status
    finally:
        connection.close()


def _measure(server: ServerProcess, seconds: float) -> dict[str, float]:
    chats: list[float] = []
    health, over = [0.0], threading.Event()

    def probe() -> None:
        while not over.wait(0.005):
            health[0] = max(health[0], _timed(server.port, "/health", b""))

    prober = threading.Thread(target=probe)
    prober.start()
    body = json.dumps({"messages": [USER], "max_tokens": 4}).encode()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        chats.append(_timed(server.port, CHAT, body))
        time.sleep(0.02)
    over.set()
    prober.join()
    return {"health_ms": 1e3 * health[0], "chat_ms": 1e3 * median(chats), "chat_max_ms": 1e3 * max(chats)}


def _timed(port: int, path: str, body: bytes) -> float:
    start = time.perf_counter()
    status = _ask(port, path, body, "127.0.0.1", 120)
    assert status == 200, f"{path} was answered with {status}"
    return time.perf_counter() - start
