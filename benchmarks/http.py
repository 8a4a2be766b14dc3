"""What a server costs: the same work offline, whole over HTTP and streamed, turn by turn, by the same number of streams.

The client runs on the cores of the server, so that its own work counts too. With --url, another engine's server has its turns
between ours; it must serve the same model and be idle.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Iterator
from statistics import mean
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from benchmarks.counting_client import stream_all
from benchmarks.figures import Figures
from benchmarks.http_client import ask
from benchmarks.load import serving
from benchmarks.options import add_engine_option, add_run_options, positive_int
from benchmarks.report import ENGINE, Report
from benchmarks.workload import random_tokens
from nanoengine import LLM, SamplingParams

OTHER = "the other server"
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"stream": False},
    "streamed": {"stream": True},
    "streamed by 8": {"stream": True, "stream_interval": 8},
}
PROMPT_LEN = 32
OPTIONS = {"scheduling_policy": "mixed", "max_num_batched_tokens": 512, "long_prefill_token_threshold": 256}
"""Those of the server, for the engine that works offline."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=positive_int, default=32, help="requests at a time (default: 32)")
    parser.add_argument("--tokens", type=positive_int, default=256, help="of each answer (default: 256)")
    parser.add_argument("--url", help="of another engine's server, such as http://127.0.0.1:8080")
    parser.add_argument("--name", help="what that server calls the model")
    add_engine_option(parser, "of the engine")
    add_run_options(parser, repeat=5)


def run(args: argparse.Namespace, report: Report) -> None:
    asyncio.run(_run(args, report))


async def _run(args: argparse.Namespace, report: Report) -> None:
    options = OPTIONS | dict(args.option)
    async with serving(args.model, {**options, "access_log": False}) as server:
        with LLM(args.model, use_tqdm=False, **options) as llm:
            for repetition in range(-1, args.repeat):  # the first is a warm-up
                num_tokens = args.tokens if repetition >= 0 else 8
                rng = random.Random(1000 * args.seed + repetition + 1)
                prompts = [random_tokens(rng, PROMPT_LEN, llm.engine.vocab_size) for _ in range(args.streams)]
                offline = _offline(llm, prompts, num_tokens)
                if repetition >= 0:
                    report.add({"work": "offline"}, _rates(offline, args.streams, num_tokens))
                for way, engine, host, port, fields in _turns(args, server.port):
                    if engine == ENGINE:
                        await ask(port, "/reset_prefix_cache", {})
                    common = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, **fields}
                    bodies = [common | {"prompt": prompt} for prompt in prompts]
                    done = await asyncio.to_thread(stream_all, host, port, bodies)
                    figures = _rates(done.seconds, args.streams, num_tokens) | {"of_offline": offline / done.seconds}
                    if fields["stream"]:
                        figures |= {"ttft_ms": 1000 * mean(done.ttft), "itl_ms": 1000 * mean(done.itl)}
                    if repetition >= 0:
                        report.add({"work": way}, figures | {"client_cpu_s": done.cpu_seconds}, engine)


def _turns(args: argparse.Namespace, port: int) -> Iterator[tuple[str, str, str, int, dict[str, Any]]]:
    """What is done in turn: the way, whose server, where it is, and fields of the requests."""
    for way, fields in WAYS.items():
        yield way, ENGINE, "127.0.0.1", port, fields
        if args.url is not None and "stream_interval" not in fields:
            url = urlsplit(args.url)
            name = {} if args.name is None else {"model": args.name}
            yield way, OTHER, url.hostname or "127.0.0.1", url.port or 80, fields | name


def _rates(seconds: float, num_streams: int, num_tokens: int) -> Figures:
    return {"output_tok_s": num_streams * num_tokens / seconds, "step_ms": 1000 * seconds / num_tokens}


def _offline(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    llm.reset_prefix_cache()
    start = perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return perf_counter() - start
