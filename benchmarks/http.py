"""What a server costs: the same work offline, whole over HTTP and streamed, turn by turn, by the same number of streams.

The client runs on the cores of the server, so that its own work counts too. With --url, another engine's server has its turns
between ours; it must serve the same model and be idle. --mock takes the engine away and measures the rest: a stand-in answers as
fast as answers are taken, pinned with the whole server to one core (Linux).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from benchmarks.counting_client import stream_all
from benchmarks.figures import Figures
from benchmarks.http_client import Client
from benchmarks.load import ServerGone, serving
from benchmarks.options import engine_option, positive_int
from benchmarks.report import Report
from benchmarks.workload import random_tokens
from nanoengine import LLM, SamplingParams

WAYS: dict[str, dict[str, Any]] = {
    "whole": {"stream": False},
    "streamed": {"stream": True},
    "streamed by 8": {"stream": True, "stream_interval": 8},
}
PROMPT_LEN = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=positive_int, default=32, help="requests at a time (default: 32)")
    parser.add_argument("--tokens", type=positive_int, default=256, help="of each answer (default: 256)")
    parser.add_argument("--url", help="of another engine's server, such as http://127.0.0.1:8080")
    parser.add_argument("--name", help="what that server calls the model")
    parser.add_argument("--mock", action="store_true", help="no model: what the server itself can do on one core")
    parser.add_argument(
        "--option", type=engine_option, action="append", default=[], metavar="NAME=VALUE", help="of the engine"
    )
    parser.add_argument("--repeat", type=positive_int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON here too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib: the extra 'bench')")


def run(args: argparse.Namespace, report: Report) -> None:
    asyncio.run(_mocked(args, report) if args.mock else _served(args, report))


async def _served(args: argparse.Namespace, report: Report) -> None:
    options = {"scheduling_policy": "mixed", "max_num_batched_tokens": 512, "long_prefill_token_threshold": 256}
    options |= dict(args.option)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(args.model, {**options, "access_log": False}))
        clients = {"nanoengine": Client("127.0.0.1", server.port)}
        if args.url is not None:
            url = urlsplit(args.url)
            clients["other"] = Client(url.hostname or "127.0.0.1", url.port or 80)
        llm = stack.enter_context(LLM(args.model, use_tqdm=False, **options))
        for repetition in range(-1, args.repeat):  # the first is a warm-up
            num_tokens = args.tokens if repetition >= 0 else 8
            offline = _offline(llm, args, repetition, num_tokens)
            if repetition >= 0:
                report.add({"work": "offline"}, _figures(offline, args.streams, num_tokens))
            for way, fields in WAYS.items():
                for engine, client in clients.items():
                    if engine == "other" and "stream_interval" in fields:
                        continue
                    bodies = await _bodies(client, fields, args, repetition, num_tokens, engine == "other")
                    seconds, more = await (_streamed if fields["stream"] else _whole)(client, bodies)
                    figures = _figures(seconds, args.streams, num_tokens) | {"of_offline": offline / seconds} | more
                    if repetition >= 0:
                        report.add({"work": way}, figures, engine)
        for client in clients.values():
            client.close()


def _figures(seconds: float, num_streams: int, num_tokens: int) -> Figures:
    return {"output_tok_s": num_streams * num_tokens / seconds, "step_ms": 1000 * seconds / num_tokens}


def _prompts(args: argparse.Namespace, repetition: int, vocab_size: int) -> list[list[int]]:
    import random

    rng = random.Random(1000 * args.seed + repetition + 1)
    return [random_tokens(rng, PROMPT_LEN, vocab_size) for _ in range(args.streams)]


def _offline(llm: LLM, args: argparse.Namespace, repetition: int, num_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    args.vocab_size = llm.engine.vocab_size
    prompts = _prompts(args, repetition, args.vocab_size)
    llm.reset_prefix_cache()
    start = perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return perf_counter() - start


async def _bodies(
    client: Client, fields: dict[str, Any], args: argparse.Namespace, repetition: int, num_tokens: int, is_other: bool
) -> list[dict[str, Any]]:
    common = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, **fields}
    if is_other and args.name is not None:
        common["model"] = args.name
    if not is_other:
        await client.request("POST", "/reset_prefix_cache")
    return [common | {"prompt": prompt} for prompt in _prompts(args, repetition, args.vocab_size)]


async def _whole(client: Client, bodies: list[dict[str, Any]]) -> tuple[float, Figures]:
    start = perf_counter()
    answers = await asyncio.gather(*(client.complete(body) for body in bodies))
    seconds = perf_counter() - start
    if bad := [answer for answer in answers if not answer.is_ok]:
        raise ServerGone(f"{len(bad)} of {len(answers)} requests failed, the first with {bad[0].error}")
    return seconds, {}


async def _streamed(client: Client, bodies: list[dict[str, Any]]) -> tuple[float, Figures]:
    streams = await asyncio.to_thread(stream_all, client.host, client.port, bodies)
    times = {"ttft_ms": 1000 * mean(streams.ttft), "itl_ms": 1000 * mean(streams.itl)}
    return streams.seconds, times | {"client_cpu_s": streams.cpu_seconds}


async def _mocked(args: argparse.Namespace, report: Report) -> None:
    command = [sys.executable, "-m", "benchmarks.mock_server"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(process.pid, {cores[0]})
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {cores[0]})
        os.sched_setaffinity(0, {cores[-1]})
        client = Client("127.0.0.1", port)
        body = {"prompt": [1, 2, 3], "max_tokens": args.tokens, "ignore_eos": True, "stream": True}
        await asyncio.gather(*(client.complete(body) for _ in range(args.streams)))
        for _ in range(args.repeat):
            start = perf_counter()
            answers = await asyncio.gather(*(client.complete(body) for _ in range(args.streams)))
            seconds = perf_counter() - start
            events = sum(len(answer.event_times) for answer in answers)
            if events != args.streams * args.tokens:
                raise ServerGone(f"{events} events came of {args.streams * args.tokens} tokens")
            report.add({"work": "streamed, no model"}, {"output_tok_s": events / seconds})
        client.close()
    finally:
        process.terminate()
        process.wait(30)
