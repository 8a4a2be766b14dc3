"""A server under load: requests arrive over HTTP, whether or not it keeps up (an open loop).

Its capacity is measured first, with a fixed number of requests at a time; then requests arrive at random (Poisson) at half of it,
at it, and at twice as much. Goodput is the requests per second that met all objectives. Whatever is measured here pays for the
client too, where both have the same cores. --url measures a server that runs already, of any engine with OpenAI's interface.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from benchmarks.drive import TEMPERATURE, RequestTimes, Run
from benchmarks.figures import Figures, goodput, latency_figures
from benchmarks.http_client import Answer, Client
from benchmarks.options import BadOption, check_range, engine_option, positive_float, positive_int
from benchmarks.report import Report
from benchmarks.serve import slo
from benchmarks.workload import CPU, poisson_arrivals, random_workload
from nanoengine.errors import NanoEngineError
from nanoengine.models.architectures import read_model_config
from nanoengine.models.description import config_table
from nanoengine.models.names import find_model

LOADS = (0.5, 1.0, 2.0)  # of the measured capacity
SETTLING = 0.2  # share of a run that does not count: the server fills up
SECONDS_TO_START = 300


class ServerGone(NanoEngineError):
    """The server that should be measured ended, or never began."""


@dataclass
class ServerProcess:
    """`nanoengine serve`, in a process of its own, with what it logs in a file."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def end_of_log(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    def resident_bytes(self) -> int:
        """Memory of the process that is in RAM (Linux)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.partition("VmRSS:")[2].split()[0])

    async def wait_ready(self) -> None:
        client = Client("127.0.0.1", self.port)
        for _ in range(10 * SECONDS_TO_START):
            if self.process.poll() is not None:
                raise ServerGone(f"the server ended with {self.process.returncode}:\n{self.end_of_log()}")
            if (await client.get("/health")).status == 200:
                client.close()
                return
            await asyncio.sleep(0.1)
        raise ServerGone(f"the server was not ready after {SECONDS_TO_START} s:\n{self.end_of_log()}")


@asynccontextmanager
async def serving(model: str, options: dict[str, Any]) -> AsyncIterator[ServerProcess]:
    """A server of our own on a free port, ready; it is ended in the end. Options are those of `nanoengine serve`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.NamedTemporaryFile("w+b", prefix="server-", suffix=".log") as log:
        command = [sys.executable, "-m", "nanoengine", "serve", model, "--port", str(port), *flags(options)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        server = ServerProcess(process, port, Path(log.name))
        try:
            await server.wait_ready()
            yield server
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def flags(options: dict[str, Any]) -> Iterator[str]:
    """Options as a command line has them."""
    for name, value in options.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{dashed}" if value else f"--no-{dashed}"
        elif value is not None:
            yield from (f"--{dashed}", str(value))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="what is served: its vocabulary counts with --url too")
    parser.add_argument("--url", help="of a server that runs, such as http://127.0.0.1:8080 (default: one is started)")
    parser.add_argument("--name", help="what requests call the model, where the server wants to hear it")
    parser.add_argument("--seconds", type=positive_float, default=30.0, help="at each load (default: 30)")
    parser.add_argument("--concurrency", type=positive_int, default=64, help="of the closed loop (default: 64)")
    parser.add_argument(
        "--slo", type=slo, default="ttft=1000,tpot=100", metavar="ttft=MS,tpot=MS", help="(default: %(default)s)"
    )
    parser.add_argument("--max-waiting", type=int, help="of the server: sequences that may wait")
    parser.add_argument("--input-len", type=positive_int, nargs=2, default=CPU.input_len, metavar=("LOW", "HIGH"))
    parser.add_argument("--output-len", type=positive_int, nargs=2, default=CPU.output_len, metavar=("LOW", "HIGH"))
    parser.add_argument(
        "--option", type=engine_option, action="append", default=[], metavar="NAME=VALUE", help="of `nanoengine serve`"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the requests and of their arrivals (default: 0)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON here too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib: the extra 'bench')")


def run(args: argparse.Namespace, report: Report) -> None:
    asyncio.run(_run(args, report))


async def _run(args: argparse.Namespace, report: Report) -> None:
    bodies = Bodies(args)
    if args.url is None:
        options = {"access_log": False, "max_waiting": args.max_waiting, **dict(args.option)}
        async with serving(args.model, options) as server:
            await measure(Client("127.0.0.1", server.port), bodies, args, report)
        return
    if args.option or args.max_waiting is not None:
        raise BadOption("--option and --max-waiting are for a server that is started here: leave them out, or --url")
    url = urlsplit(args.url)
    if url.scheme != "http" or url.hostname is None:
        raise BadOption(f"--url is {args.url}: it must be http://HOST:PORT")
    await measure(Client(url.hostname, url.port or 80), bodies, args, report)


class Bodies:
    """Requests, equal for equal seeds: random tokens, as many of them out as were asked for."""

    def __init__(self, args: argparse.Namespace):
        vocab_size = read_model_config(config_table(find_model(args.model))).vocab_size
        self._lengths = check_range("--input-len", tuple(args.input_len)), check_range("--output-len", args.output_len)
        self._vocab_size = vocab_size
        self._seed = args.seed
        self._common: dict[str, Any] = {"stream": True, "ignore_eos": True, "temperature": TEMPERATURE}
        if args.name is not None:
            self._common["model"] = args.name

    def make(self, number: int, salt: int) -> list[dict[str, Any]]:
        """So many; other salts give others, so that no prompt is in the cache of an earlier run."""
        work = random_workload(number, *self._lengths, self._vocab_size, 1000 * self._seed + salt)
        return [
            self._common | {"prompt": prompt, "max_tokens": length}
            for prompt, length in zip(work.prompts, work.output_lens, strict=True)
        ]


@dataclass
class Sample:
    """A request, when it was due, and what came of it."""

    due: float
    body: dict[str, Any]
    answer: Answer

    @property
    def times(self) -> RequestTimes:
        return RequestTimes(
            self.due, len(self.body["prompt"]), token_times=self.answer.text_times or [self.answer.ended]
        )


async def measure(client: Client, bodies: Bodies, args: argparse.Namespace, report: Report) -> None:
    warm_up = await closed_loop(client, bodies.make(2 * args.concurrency, 0), args.concurrency, 1e9)
    if bad := [sample.answer for sample in warm_up if not sample.answer.is_ok]:
        raise ServerGone(f"{len(bad)} of {len(warm_up)} requests failed in the warm-up, the first with {bad[0].error}")
    seconds = args.seconds
    rate = len(warm_up) / (max(sample.answer.ended for sample in warm_up) - warm_up[0].due)
    start = perf_counter()
    more = bodies.make(args.concurrency + int(3 * rate * seconds), 1)
    samples = await closed_loop(client, more, args.concurrency, seconds)
    capacity = add_figures(report, "closed", samples, start, args)["finished_req_s"]
    if not capacity:
        raise ServerGone(f"no request ended within {seconds:g} s: raise --seconds, or shorten them")
    report.facts["capacity_req_s"] = capacity
    goodputs = []
    for number, load in enumerate(LOADS):
        arrivals = poisson_arrivals(load * capacity, max(1, round(load * capacity * seconds)), args.seed + number)
        start = perf_counter()
        samples = await open_loop(client, bodies.make(len(arrivals), 2 + number), arrivals)
        goodputs.append(add_figures(report, f"{load:g} x capacity", samples, start, args)["goodput_req_s"])
    if max(goodputs):
        report.add({}, {"overload_goodput_share": goodputs[-1] / max(goodputs)})
    client.close()


async def closed_loop(
    client: Client, bodies: Sequence[dict[str, Any]], concurrency: int, seconds: float
) -> list[Sample]:
    """So many requests at a time, and none is begun after so many seconds."""
    samples: list[Sample] = []
    numbers = count()
    end = perf_counter() + seconds

    async def work() -> None:
        while (number := next(numbers)) < len(bodies) and perf_counter() < end:
            due = perf_counter()
            samples.append(Sample(due, bodies[number], await client.complete(bodies[number])))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return samples


async def open_loop(client: Client, bodies: Sequence[dict[str, Any]], arrivals: Sequence[float]) -> list[Sample]:
    """Each request when it is due; waits for the last of them to end."""
    start = perf_counter()

    async def one(body: dict[str, Any], due: float) -> Sample:
        return Sample(due, body, await client.complete(body))

    tasks = []
    for body, arrival in zip(bodies, arrivals, strict=True):
        await asyncio.sleep(max(0.0, start + arrival - perf_counter()))
        tasks.append(asyncio.create_task(one(body, start + arrival)))
    return list(await asyncio.gather(*tasks))


def add_figures(
    report: Report, case: str, samples: Sequence[Sample], start: float, args: argparse.Namespace
) -> Figures:
    """Rates count what ended while requests arrived, but for the beginning; latencies are of all that were let in."""
    end, begin = start + args.seconds, start + SETTLING * args.seconds
    ok = [sample for sample in samples if sample.answer.is_ok]
    ended = [sample.times for sample in ok if begin <= sample.answer.ended < end]
    refused = sum(sample.answer.status == 503 for sample in samples)
    figures: Figures = {
        "sent_req_s": sum(begin <= sample.due < end for sample in samples) / (end - begin),
        "finished_req_s": len(ended) / (end - begin),
        "goodput_req_s": goodput(Run(ended, seconds=end - begin), args.slo)["goodput_req_s"] if ended else 0.0,
        "refused": refused,
        "errors": len(samples) - len(ok) - refused,
        **latency_figures([sample.times for sample in ok], detailed=True),
    }
    report.add({"load": case}, figures)
    for sample in samples:
        if not sample.answer.is_ok and sample.answer.status != 503:
            report.warn(f"{case}: a request failed, such as with status {sample.answer.status}, {sample.answer.error}")
            break
    return figures
