"""A soak: a server at 80 % of its capacity, for a time, with all that clients do to servers.

Streamed and whole completions and chats, several at once, with stop strings, log probabilities and shared prefixes; some are
aborted, some clients vanish, read slowly or send nonsense. Each greedy answer is compared with that of an engine in this
process (float32; prompts where two tokens are nearly as likely are left out). At the end the server must be idle with all its
blocks back, and hold no more memory than it did after a quarter of the time. The exit status is 1 if anything was not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.http_client import Answer, Client, Connection
from benchmarks.load import ServerProcess, serving
from benchmarks.options import engine_option, positive_float, positive_int
from benchmarks.report import Report
from benchmarks.soak_answers import CHAT, COMPLETIONS, Case, Note, choices_of, fault, known_cases, memory_fault

LOAD = 0.8  # of the measured capacity
CAPACITY_SHARE = 0.1  # of the time, to measure it
CONCURRENCY = 16  # meanwhile
NOTE_SECONDS = 30.0
SECONDS_TO_ANSWER = 300.0
OPTIONS = {"max_model_len": 1024, "num_kv_blocks": 512}  # a pool that is soon full, so that its memory is all in use
KILL_OPTIONS = {
    "max_model_len": 256,
    "num_kv_blocks": 64,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
}  # overflows to disk

METRICS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "used": "vllm:kv_cache_usage_perc",
}

BAD: tuple[tuple[str, bytes], ...] = (
    (COMPLETIONS, b""),
    (COMPLETIONS, b'{"prompt": '),
    (COMPLETIONS, b"[" * 100_000),
    (COMPLETIONS, b'{"prompt": "a", "no_such_field": 1}'),
    (COMPLETIONS, b'{"prompt": {"a": 1}}'),
    (COMPLETIONS, b'{"prompt": [-1]}'),
    (COMPLETIONS, b'{"prompt": [2147483647]}'),
    (COMPLETIONS, b'{"prompt": "a", "temperature": "hot"}'),
    (COMPLETIONS, b'{"prompt": "a", "n": 1000000}'),
    (COMPLETIONS, b'{"prompt": "a", "max_tokens": 1000000}'),
    (COMPLETIONS, b'{"prompt": "a", "model": "nobody"}'),
    (COMPLETIONS, b'{"prompt": [%b1]}' % (b"1," * 100_000)),
    (CHAT, b'{"messages": []}'),
    (CHAT, b'{"messages": "hello"}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "stop": [1, 2]}'),
)


async def gauges_of(client: Client) -> dict[str, float]:
    """Sequences running and waiting, and KV blocks in use (as a share, if only /metrics can say). Empty if neither is there."""
    answer = await client.get("/view")
    if answer.is_ok:
        view = json.loads(answer.body)
        return {"running": view["num_running"], "waiting": view["num_waiting"], "used": view["pool"]["num_used"]}
    answer = await client.get("/metrics")
    lines = [line.split() for line in answer.body.decode().splitlines()] if answer.is_ok else []
    found = {line[0].partition("{")[0]: float(line[-1]) for line in lines if line and line[0] != "#"}
    return {name: found[metric] for name, metric in METRICS.items() if metric in found}


def _first_block(case: Case) -> tuple[int, ...]:
    """The tokens that other prompts must begin with to hit this one's cached blocks."""
    return tuple(case.request.get("prompt", ())[:16])


class Soak:
    """Clients of all kinds, and what came of them.

    Args:
        server: under test.
        cases: known requests.
        seed: of all that is drawn.
    """

    def __init__(self, server: ServerProcess, cases: Sequence[Case], seed: int):
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.notes: list[Note] = []
        self.is_killed = False  # the server, by us: what is cut off now is no fault
        self.served: set[int] = set()  # numbers of the cases that were answered
        self._server = server
        self._cases = cases
        self._rng = random.Random(seed)
        self._numbers = count()
        self._client = Client("127.0.0.1", server.port)
        self._slow = Client("127.0.0.1", server.port, receive_buffer=4096)
        self._kinds: dict[Callable[[], Awaitable[str]], int] = {  # and how many of a hundred requests
            self.ask: 60,
            self.sample: 10,
            self.abort: 10,
            self.vanish: 8,
            self.read_slowly: 4,
            self.send_nonsense: 7,
            self.reconnect: 1,
        }

    async def act(self) -> None:
        """One client does what is drawn for it; what becomes of that is counted."""
        (action,) = self._rng.choices([*self._kinds], [*self._kinds.values()])
        try:
            outcome = await asyncio.wait_for(action(), SECONDS_TO_ANSWER)
        except TimeoutError:
            outcome = f"lost: no answer within {SECONDS_TO_ANSWER:g} s"
        self.count(getattr(action, "__name__", "action"), outcome)

    def count(self, name: str, outcome: str) -> None:
        """Count an outcome by its kind, which ends at a colon; whatever has one is a fault."""
        kind, colon, _ = outcome.partition(":")
        if colon and self.is_killed and kind == "failed":
            kind, colon = "killed", ""
        self.counts[f"{name} {kind}"] += 1
        if colon:
            self.faults.append(f"{name} {outcome}"[:1000])

    def _draw(self) -> tuple[int, Case, int, dict[str, Any]]:
        """A known case, with its number, how many completions, and the request."""
        rng = self._rng
        number = rng.randrange(len(self._cases))
        case, n = self._cases[number], rng.choice((1, 1, 1, 2, 3))
        body = case.request | {"n": n, "return_token_ids": True, "stream": rng.random() < 0.6}
        if rng.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": 2} if case.path == CHAT else {"logprobs": 2}
        if rng.random() < 0.2:
            body["priority"] = rng.randint(0, 4)
        if body["stream"] and rng.random() < 0.3:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": rng.random() < 0.5}
        return number, case, n, body

    def _outcome(self, number: int, n: int, answer: Answer, *, may_be_aborted: bool = False) -> str:
        if answer.status == 503:
            return "refused"
        found = fault(self._cases[number], n, answer, may_be_aborted=may_be_aborted)
        if found is None:
            self.served.add(number)
        return found or "right"

    async def ask(self) -> str:
        number, case, n, body = self._draw()
        return self._outcome(number, n, await self._client.complete(body, case.path, keep=True))

    async def sample(self) -> str:
        """Nobody knows the text, but there must be one of each."""
        _, case, n, body = self._draw()
        body |= {"temperature": 1.0, "top_p": 0.9, "seed": self._rng.randrange(1 << 30)}
        answer = await self._client.complete(body, case.path, keep=True)
        if answer.status == 503:
            return "refused"
        if not answer.is_ok:
            return f"failed: status {answer.status}, {answer.error}"
        ends = {index: len(choice.finish_reasons) for index, choice in choices_of(answer).items()}
        return "whole" if ends == dict.fromkeys(range(n), 1) else f"lost: of {n} choices, ends of {ends}"

    async def abort(self) -> str:
        number, case, n, body = self._draw()
        body["request_id"] = f"soak-{next(self._numbers)}"
        task = asyncio.create_task(self._client.complete(body, case.path, keep=True))
        await asyncio.sleep(self._rng.uniform(0, 0.3))
        answer_id = f"{'chatcmpl' if case.path == CHAT else 'cmpl'}-{body['request_id']}"
        await self._client.complete({"request_ids": [answer_id]}, "/abort_requests")
        return self._outcome(number, n, await task, may_be_aborted=True)

    async def vanish(self) -> str:
        """Close the connection before the first byte, at it, or later."""
        number, case, n, body = self._draw()
        num_reads = self._rng.choice((0, 1, 4))
        if num_reads == 0:
            task = asyncio.create_task(self._client.complete(body, case.path, keep=True))
            await asyncio.sleep(self._rng.uniform(0, 0.05))
            task.cancel()
            with suppress(asyncio.CancelledError):
                return self._outcome(number, n, await task)
            return "gone"
        reads = count(1)

        def leave(connection: Connection) -> None:
            if next(reads) == num_reads:
                connection.close()

        answer = await self._client.complete(body, case.path, keep=True, on_data=leave)
        return "gone" if next(reads) > num_reads else self._outcome(number, n, answer)

    async def read_slowly(self) -> str:
        number, case, n, body = self._draw()
        seconds = self._rng.uniform(0.01, 0.2)

        def pause(connection: Connection) -> None:
            connection.transport.pause_reading()
            asyncio.get_running_loop().call_later(seconds, connection.transport.resume_reading)

        return self._outcome(number, n, await self._slow.complete(body, case.path, keep=True, on_data=pause))

    async def send_nonsense(self) -> str:
        path, body = self._rng.choice(BAD)
        answer = await self._client.complete(body, path)
        if 400 <= answer.status < 500 or answer.status == 503:
            return "refused"
        return f"failed: {body[:60]!r} has status {answer.status}, {answer.error}"

    async def reconnect(self) -> str:
        """All clients start anew: their connections close, but for those that wait for an answer."""
        self._client.close()
        self._slow.close()
        return "done"

    # ---- the run

    async def measure_capacity(self, seconds: float) -> float:
        """Requests per second, with a fixed number of clients."""
        start, before = perf_counter(), self.counts.total()

        async def work() -> None:
            while perf_counter() < start + seconds:
                await self.act()

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        return (self.counts.total() - before) / (perf_counter() - start)

    async def run(self, rate: float, seconds: float) -> None:
        """So many clients a second, at random times; waits for the last of them."""
        start = perf_counter()
        watch = asyncio.create_task(self._watch())
        tasks: set[asyncio.Task[None]] = set()
        due = start
        while due < start + seconds and not self.is_killed:
            await asyncio.sleep(due - perf_counter())
            task = asyncio.create_task(self.act())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due += self._rng.expovariate(rate)
        await asyncio.gather(*tasks)
        watch.cancel()

    async def _watch(self) -> None:
        start = perf_counter()
        while self._server.process.poll() is None:
            self.notes.append(
                Note(perf_counter() - start, self._server.resident_bytes(), await gauges_of(self._client))
            )
            await asyncio.sleep(NOTE_SECONDS)

    async def kill(self, after: float) -> None:
        """SIGKILL, after some seconds."""
        await asyncio.sleep(after)
        self.is_killed = True
        self._server.process.kill()
        self._server.process.wait()

    async def check_idle(self) -> None:
        """Everybody has gone: nothing may run, wait, or hold blocks."""
        gauges: dict[str, float] = {}
        for _ in range(50):
            gauges = await gauges_of(self._client)
            load = await self._client.get("/load")
            if load.is_ok:
                gauges["calls"] = json.loads(load.body)["server_load"]
            if gauges and not any(gauges.values()):
                break
            await asyncio.sleep(0.1)
        self.count("end", "idle" if gauges and not any(gauges.values()) else f"leaked: {gauges}")
        if found := memory_fault(self.notes):
            self.count("end", found)

    async def ask_again(self, served: set[int]) -> None:
        """After a restart: what was served before must be right again, and some of it must come from the disk: prompts of whose
        first block there is no other."""
        num_cached = 0
        first_blocks = Counter(map(_first_block, self._cases))
        for number in sorted(served):
            case = self._cases[number]
            answer = await self._client.complete(case.request | {"return_token_ids": True}, case.path, keep=True)
            self.count("restart", self._outcome(number, 1, answer))
            if answer.is_ok and first_blocks[_first_block(case)] == 1 and case.path == COMPLETIONS:
                num_cached += json.loads(answer.body)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        self.counts["restart cached"] += num_cached
        if not num_cached:
            self.count("restart", f"lost: of {len(served)} prompts served before, none was in the cache")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="'demo' (bundled), a folder, or a hub name (default: demo)")
    parser.add_argument("--minutes", type=positive_float, default=30.0, help="of load (default: 30)")
    parser.add_argument("--cases", type=positive_int, default=128, help="known requests (default: 128)")
    parser.add_argument("--kill", action="store_true", help="SIGKILL half-way, and a restart on the same disk tier")
    parser.add_argument(
        "--option", type=engine_option, action="append", default=[], metavar="NAME=VALUE", help="of `nanoengine serve`"
    )
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON here too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib: the extra 'bench')")


def run(args: argparse.Namespace, report: Report) -> int:
    """Soak a server; 1 if there was any fault."""
    cases = known_cases(args.model, args.cases, OPTIONS["max_model_len"], args.seed)
    with ExitStack() as stack:
        options = {"dtype": "float32", "access_log": False, **OPTIONS, **dict(args.option)}
        if args.kill:
            options |= KILL_OPTIONS
            if "kv_disk_path" not in options:
                options["kv_disk_path"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-"))
        faults = asyncio.run(_run(args, options, cases, report))
    for text in faults[:20]:
        report.warn(text)
    return 1 if faults else 0


async def _run(args: argparse.Namespace, options: dict[str, Any], cases: Sequence[Case], report: Report) -> list[str]:
    seconds = 60 * args.minutes
    killed = None
    if args.kill:
        seconds /= 2
        async with serving(args.model, options) as server:
            killed = Soak(server, cases, args.seed)
            rate = LOAD * await killed.measure_capacity(CAPACITY_SHARE * seconds)
            await asyncio.gather(killed.run(rate, 2 * seconds), killed.kill(seconds))
        show(killed, rate, report, "until the kill")
    async with serving(args.model, options) as server:
        soak = Soak(server, cases, args.seed + 1)
        if killed is not None:
            await soak.ask_again(killed.served)
        rate = LOAD * await soak.measure_capacity(CAPACITY_SHARE * seconds)
        await soak.run(rate, seconds)
        await soak.check_idle()
        if server.process.poll() is not None:
            soak.count("end", f"died: with {server.process.returncode}, {server.end_of_log()}")
    show(soak, rate, report, "after the kill" if killed else "soak")
    return soak.faults + (killed.faults if killed else [])


def show(soak: Soak, rate: float, report: Report, phase: str) -> None:
    """What happened, as rows of the report."""
    report.add({"phase": phase}, {"rate_req_s": rate, "faults": len(soak.faults), "requests": soak.counts.total()})
    for outcome, number in sorted(soak.counts.items()):
        report.add({"phase": phase, "outcome": outcome}, {"count": number})
    for note in soak.notes:
        report.add({"phase": phase, "second": round(note.seconds)}, {"rss_mib": note.resident / 2**20, **note.gauges})
