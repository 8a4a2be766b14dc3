"""A soak: a server, for a time, with all that clients do to servers, and nothing may be wrong, lost or leaked.

Clients ask for streamed and whole completions and chats, with stop strings, log probabilities and shared prefixes; some abort,
vanish, read slowly or send nonsense. Each greedy answer is compared with that of an engine in this process (float32; prompts
where two tokens are nearly as likely are left out). At the end the server must be idle with all its blocks back, and hold no more
memory than it did after a quarter of the time. The exit status is 1 if anything was not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from benchmarks.http_client import Answer, ask
from benchmarks.load import ServerProcess, serving
from benchmarks.options import add_engine_option, positive_float, positive_int
from benchmarks.report import Report
from benchmarks.texts import windows
from nanoengine import LLM, SamplingParams
from nanoengine.core.outputs import CompletionOutput

NOTE_SECONDS = 30.0
SECONDS_TO_ANSWER = 300.0
OPTIONS = {"max_model_len": 1024, "num_kv_blocks": 512}
"""A pool that is soon full, so that its memory is all in use."""

PREFIX, PROMPT = 48, 96
"""Tokens: of what prompts share, and of a whole one at most."""

CLEAR_LOGPROB = 1e-3
"""Between the likeliest token and the next: sums in another order differ by a thousandth of that."""

MEMORY_GROWTH, LEAST_NOTES = 1.02, 12
"""Of memory from the first quarter to the last; fewer notes say nothing, since it takes minutes until all caches are full."""

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BAD: tuple[tuple[str, bytes], ...] = (
    (COMPLETIONS, b'{"prompt": '),
    (COMPLETIONS, b"[" * 100_000),
    (COMPLETIONS, b'{"prompt": "a", "no_such_field": 1}'),
    (COMPLETIONS, b'{"prompt": [-1]}'),
    (COMPLETIONS, b'{"prompt": "a", "temperature": "hot"}'),
    (COMPLETIONS, b'{"prompt": "a", "n": 1000000}'),
    (COMPLETIONS, b'{"prompt": "a", "model": "nobody"}'),
    (COMPLETIONS, b'{"prompt": [%b1]}' % (b"1," * 100_000)),
    (CHAT, b'{"messages": []}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "stop": [1, 2]}'),
)


class Case(NamedTuple):
    """A greedy request, and what must come of it."""

    request: dict[str, Any]
    text: str
    token_ids: list[int]
    finish_reason: str | None

    @property
    def path(self) -> str:
        return CHAT if "messages" in self.request else COMPLETIONS


def known_cases(model: str, number: int, seed: int) -> list[Case]:
    """Requests with their answers, offline: a third are chats, half of the others share beginnings, some end at a string."""
    rng, cases = random.Random(seed), list[Case]()
    with LLM(model, dtype="float32", max_model_len=OPTIONS["max_model_len"], use_tqdm=False) as llm:

        def answer(request: dict[str, Any], **params: Any) -> CompletionOutput:
            own = SamplingParams(temperature=0, max_tokens=request["max_tokens"], **params)
            chats = "messages" in request
            outputs = (llm.chat if chats else llm.generate)(
                request["messages" if chats else "prompt"], own, use_tqdm=False
            )
            return outputs[0].outputs[0]

        pieces = windows(["prose", "code"], llm.tokenizer, number, PROMPT)
        rng.shuffle(pieces)
        for index, piece in enumerate(pieces[:number]):
            request: dict[str, Any] = {"temperature": 0, "max_tokens": rng.randint(1, 96)}
            if index % 3 == 0:
                content = llm.tokenizer.decode(piece)[: rng.randint(20, 200)]
                request["messages"] = [{"role": "user", "content": content}]
            else:
                shared = pieces[index % 2][:PREFIX] if index % 3 == 1 else []
                request["prompt"] = [*shared, *piece[: rng.randint(1, PROMPT)]]
            found = answer(request, logprobs=2)
            best = [sorted((own.logprob for own in entry.values()), reverse=True) for entry in found.logprobs or ()]
            if any(first - second <= CLEAR_LOGPROB for first, second, *_ in best):
                continue
            if index % 4 == 0 and len(found.text) > 8:
                at = rng.randrange(len(found.text) - 3)
                request["stop"] = [found.text[at : at + 3]]
                found = answer(request, stop=request["stop"])
            cases.append(Case(request, found.text, found.token_ids, found.finish_reason))
    return cases


class Choice(NamedTuple):
    """One completion, put together of the pieces of a stream, or whole."""

    text: list[str]
    token_ids: list[int]
    finish_reasons: list[str]


def choices_of(answer: Answer) -> dict[int, Choice]:
    """The completions of an answer, by index."""
    texts = [answer.body]
    if answer.is_stream:
        texts = [event[6:] for event in answer.body.split(b"\n\n") if event.startswith(b"data: {")]
    choices: dict[int, Choice] = {}
    for entry in (entry for text in texts for entry in json.loads(text)["choices"]):
        choice = choices.setdefault(entry["index"], Choice([], [], []))
        said = entry.get("delta") or entry.get("message") or entry
        choice.text.append(said.get("content") or said.get("text") or "")
        choice.token_ids.extend(entry.get("token_ids") or [])
        choice.finish_reasons.extend([entry["finish_reason"]] if entry.get("finish_reason") else [])
    return choices


def fault(case: Case, n: int, answer: Answer, *, may_be_aborted: bool = False) -> str | None:
    """What is wrong with an answer, beginning with the kind of fault: failed, lost or wrong. None: nothing."""
    if not answer.is_ok:
        return f"failed: status {answer.status}, {answer.error}"
    if answer.is_stream and not answer.is_done:
        return "lost: the end of the stream"
    choices = choices_of(answer)
    if set(choices) != set(range(n)):
        return f"lost: choices {sorted(choices)} of {n}"
    for choice in choices.values():
        text, tokens, reasons = "".join(choice.text), choice.token_ids, choice.finish_reasons
        if may_be_aborted and reasons == ["abort"]:
            # Such a text may end within a character, and may have the beginning of a stop string.
            begins = tokens == case.token_ids[: len(tokens)]
            is_right = begins and (case.text.startswith(text.rstrip("\ufffd")) or "stop" in case.request)
        else:
            is_right = (text, tokens, reasons) == (case.text, case.token_ids, [case.finish_reason])
        if not is_right:
            return f"wrong: {choice} is not of {case}"
    return None


class Note(NamedTuple):
    """The server at a time: seconds since the start, bytes in RAM, and what it says of itself."""

    seconds: float
    resident: int
    gauges: dict[str, float]


def memory_fault(notes: Sequence[Note]) -> str | None:
    """Whether the last quarter took more memory than there was after the first; None if not, or if the time was too short."""
    if len(notes) < LEAST_NOTES:
        return None
    total = notes[-1].seconds
    before = max(note.resident for note in notes if note.seconds <= 0.25 * total)
    last = sorted(note.resident for note in notes if note.seconds >= 0.75 * total)
    after = last[len(last) // 2]
    if after <= MEMORY_GROWTH * before:
        return None
    return f"memory: {before >> 20} MiB after a quarter of the time, {after >> 20} MiB in the last"


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
        self._server, self._cases, self._rng, self._numbers = server, cases, random.Random(seed), count()
        self._kinds: dict[Callable[[], Awaitable[str]], int] = {  # and how many of a hundred requests
            self.asks: 70,
            self.aborts: 10,
            self.vanishes: 8,
            self.reads_slowly: 5,
            self.sends_nonsense: 7,
        }

    def count(self, name: str, outcome: str) -> None:
        """Count an outcome by its kind, which ends at a colon; whatever has one is a fault."""
        kind, colon, _ = outcome.partition(":")
        self.counts[f"{name} {kind}"] += 1
        if colon:
            self.faults.append(f"{name} {outcome}"[:1000])

    async def _complete(self, *, may_be_aborted: bool = False, request_id: str | None = None, **how: Any) -> str:
        """Ask a known case, and say what came of it."""
        rng = self._rng
        case, n = rng.choice(self._cases), rng.choice((1, 1, 1, 2, 3))
        body = case.request | {"n": n, "return_token_ids": True, "stream": rng.random() < 0.6}
        if rng.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": 2} if case.path == CHAT else {"logprobs": 2}
        if rng.random() < 0.2:
            body["priority"] = rng.randint(0, 4)
        if request_id is not None:
            body["request_id"] = request_id
        answer = await ask(self._server.port, case.path, body, **how)
        if answer.status == 503:
            return "refused"
        return fault(case, n, answer, may_be_aborted=may_be_aborted) or "right"

    async def asks(self) -> str:
        return await self._complete()

    async def aborts(self) -> str:
        request_id = f"soak-{next(self._numbers)}"
        task = asyncio.create_task(self._complete(may_be_aborted=True, request_id=request_id))
        await asyncio.sleep(self._rng.uniform(0, 0.3))
        body = {"request_ids": [f"{kind}-{request_id}" for kind in ("cmpl", "chatcmpl")]}
        await ask(self._server.port, "/abort_requests", body)
        return await task

    async def vanishes(self) -> str:
        """Close the connection before the first byte, at it, or later."""
        await self._complete(most_reads=self._rng.choice((0, 1, 4)))
        return "gone"

    async def reads_slowly(self) -> str:
        return await self._complete(pause=self._rng.uniform(0.01, 0.2))

    async def sends_nonsense(self) -> str:
        path, body = self._rng.choice(BAD)
        answer = await ask(self._server.port, path, body)
        if 400 <= answer.status < 500 or answer.status == 503:
            return "refused"
        return f"failed: {body[:60]!r} has status {answer.status}, {answer.error}"

    async def run(self, num_clients: int, seconds: float) -> None:
        """So many clients, each of which does one thing after the other as it is drawn."""
        start = perf_counter()

        async def client() -> None:
            while perf_counter() < start + seconds:
                (action,) = self._rng.choices([*self._kinds], [*self._kinds.values()])
                try:
                    outcome = await asyncio.wait_for(action(), SECONDS_TO_ANSWER)
                except TimeoutError:
                    outcome = f"lost: no answer within {SECONDS_TO_ANSWER:g} s"
                self.count(getattr(action, "__name__", "action"), outcome)

        async def watch() -> None:
            while perf_counter() < start + seconds and self._server.process.poll() is None:
                since = perf_counter() - start
                self.notes.append(Note(since, self._server.resident_bytes(), await self._gauges()))
                await asyncio.sleep(min(NOTE_SECONDS, seconds))

        await asyncio.gather(watch(), *(client() for _ in range(num_clients)))

    async def _gauges(self) -> dict[str, float]:
        """Sequences running and waiting, and the share of KV blocks in use; empty while nobody says so."""
        answer = await ask(self._server.port, "/metrics")
        lines = [line.split() for line in answer.body.decode().splitlines() if line.startswith(GAUGES)]
        return {line[0].partition("{")[0]: float(line[-1]) for line in lines}

    async def check_idle(self) -> None:
        """Everybody has gone: nothing may run, wait, or hold blocks, and memory may not have grown."""
        gauges: dict[str, float] = {}
        for _ in range(50):
            gauges = await self._gauges()
            if gauges and not any(gauges.values()):
                break
            await asyncio.sleep(0.1)
        self.count("end", "idle" if gauges and not any(gauges.values()) else f"leaked: {gauges}")
        if found := memory_fault(self.notes):
            self.count("end", found)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="'demo' (bundled), a folder, or a hub name (default: demo)")
    parser.add_argument("--minutes", type=positive_float, default=30.0, help="of load (default: 30)")
    parser.add_argument("--clients", type=positive_int, default=16, help="at a time (default: 16)")
    parser.add_argument("--cases", type=positive_int, default=128, help="known requests (default: 128)")
    add_engine_option(parser, "of `nanoengine serve`")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON here too")


def run(args: argparse.Namespace, report: Report) -> int:
    """Soak a server; 1 if there was any fault."""
    cases = known_cases(args.model, args.cases, args.seed)
    soak = asyncio.run(_run(args, cases))
    report.add({}, {"requests": soak.counts.total(), "faults": len(soak.faults)})
    for outcome, number in sorted(soak.counts.items()):
        report.add({"outcome": outcome}, {"count": number})
    for note in soak.notes:
        report.add({"second": round(note.seconds)}, {"rss_mib": note.resident / 2**20, **note.gauges})
    for text in soak.faults[:20]:
        report.warn(text)
    return 1 if soak.faults else 0


async def _run(args: argparse.Namespace, cases: Sequence[Case]) -> Soak:
    options = {"dtype": "float32", "access_log": False, **OPTIONS, **dict(args.option)}
    async with serving(args.model, options) as server:
        soak = Soak(server, cases, args.seed)
        await soak.run(args.clients, 60 * args.minutes)
        await soak.check_idle()
    return soak
