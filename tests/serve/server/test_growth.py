"""However a body grows, the work that is done for it grows no faster, and what the event loop does of it does not grow at all."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import json
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import msgspec
import pytest

from nanoengine.features.structured.long_text import LongText
from nanoengine.features.structured.mask_filling import StepMasks
from nanoengine.serve.server.admission.fair_thread_pool import FairThreadPool
from nanoengine.serve.server.admission.text_threads import TextThreads
from nanoengine.serve.server.bodies.reading import SLOW_BYTES, TURNS
from nanoengine.serve.server.config import ServerConfig
from nanoengine.serve.server.http.app import make_app
from nanoengine.serve.server.served_model import ServedModel
from tests.serve.server.bodies import CALL, DOORS, FUNCTION, USER, positions
from tests.serve.server.in_process import post
from tests.serve.server.parrot import TEMPLATE, build, save_tokenizer
from tests.serve.server.running import Server

NUM_DRAWN = int(os.environ.get("NANOENGINE_NUM_GROWN", "12"))
"""Ways to grow, of each path; a search takes more of them."""

SIZES = [SLOW_BYTES * 2**power for power in range(1, 4)]
SLACK = 4000
"""Calls that a request of any length takes, and what the moment decides: how often the event loop wakes."""

PER_BYTE = 12
"""Calls for a byte at most: a value of a schema, which may have two bytes, is weighed, checked for its depth, and copied."""

COPIED = (str, list, tuple, dict)
GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
"""They hand over what is there."""

EMBEDDING = ("/v1/embeddings", "/api/embed")
"""What the toy cannot do."""

Grown = Callable[[int], Any]


class Work(NamedTuple):
    """Calls of functions, and the lengths of what they returned; in all threads, and on the event loop."""

    total: int
    on_loop: int
    status: int
    answer: bytes = b""

    def __repr__(self) -> str:
        return f"{self.total} calls, {self.on_loop} of them on the event loop, for a {self.status}"


def counter() -> tuple[list[int], Callable[[FrameType, str, Any], None]]:
    """A count, and a profiler that counts there. Of what a function returns, 4 parts were copied as a rule: a call more."""
    count = [0]

    def profile(frame: FrameType, event: str, result: Any) -> None:
        count[0] += 1
        if event == "return" and type(result) in COPIED and not frame.f_code.co_flags & GENERATORS:
            count[0] += len(result) >> 2

    return count, profile


class Counted:
    """A server whose work is counted: its application on an event loop of this thread, with threads of its own."""

    def __init__(self, serving: ServedModel):
        self.serving = copy.copy(serving)
        self.app = make_app(self.serving)

    def ask(self, path: str, body: bytes) -> Work:
        return asyncio.run(self._ask(path, body))

    async def _ask(self, path: str, body: bytes) -> Work:
        serving = self.serving
        on_loop, profile_loop = counter()
        in_threads, profile_threads = counter()
        threading.setprofile(profile_threads)
        serving.text, serving.grammar_threads = TextThreads(2), FairThreadPool(2, 1)
        sys.setprofile(profile_loop)
        try:
            status, answer = await post(self.app, path, body)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            serving.text.close()
            serving.grammar_threads.close()
        return Work(on_loop[0] + in_threads[0], on_loop[0], status, answer)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counted]:
    folder: Path = save_tokenizer(tmp_path_factory.mktemp("growth"), "{# <tool_call> #}" + TEMPLATE)
    config = ServerConfig(access_log=False)
    serving = ServedModel(lambda: build(folder, max_model_len=1 << 14, num_blocks=1 << 13), config, "demo")
    yield Counted(serving)
    serving.close()


def copies(item: Any, size: int) -> Any:
    """An item again and again; what has a name has one of its own."""
    text = json.dumps(item)
    return [json.loads(text.replace('"f"', f'"f{i}"')) for i in range(size // (len(text) + 2) + 1)]


def nested(size: int) -> Any:
    depth = size // 6
    return msgspec.Raw(b'{"a":' * depth + b"1" + b"}" * depth)


GROWTHS: tuple[Grown, ...] = (
    lambda size: "ab, " * (size // 4),
    lambda size: "[" * size,
    lambda size: "<" * size,
    lambda size: [1] * (size // 3),
    lambda size: ["a"] * (size // 5),
    lambda size: [{"type": "text", "text": "a"}] * (size // 33),
    lambda size: copies(USER, size),
    lambda size: copies(FUNCTION, size),
    lambda size: copies(CALL, size),
    lambda size: {f"k{i}": "a" for i in range(size // 13)},
    lambda size: {str(i): 1 for i in range(size // 9)},
    lambda size: {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(size // 30)}},
    lambda size: {"type": "object", "enum": [str(i) for i in range(size // 8)]},
    lambda size: [nested(300)] * (size // 300),
    nested,
)


def ways_to_grow(value: Any) -> Iterator[Grown]:
    """More of a value: what is there again and again, or something else."""
    yield from GROWTHS
    if isinstance(value, str):
        yield lambda size: value * (size // max(1, len(value)))
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield lambda size, index=index, item=item: [*value[:index], *copies(item, size), *value[index:]]
    if isinstance(value, dict):
        yield lambda size: {**value, **{f"{key}{i}": own for key, own in value.items() for i in range(size // 100)}}


def check_growth(counted: Counted, path: str, body: Grown) -> str:
    """What is wrong with the work for this body; nothing, as a rule."""
    bodies = [msgspec.json.encode(body(size)) for size in SIZES]
    works = [counted.ask(path, own) for own in bodies]
    told = f"{path} {bodies[0][:200]!r} ... {bodies[0][-200:]!r}, {[len(own) for own in bodies]} bytes: {works}"
    if any(work.status >= 500 for work in works):
        return f"fails: {told}"
    if any(work.total > SLACK + PER_BYTE * len(own) for work, own in zip(works, bodies, strict=True)):
        return f"too much: {told}"
    if any(second.total > SLACK + 2.5 * first.total for first, second in itertools.pairwise(works)):
        return f"grows too fast: {told}"
    if len(bodies[0]) > SLOW_BYTES and works[-1].on_loop > works[0].on_loop + SLACK // 4:
        return f"on the event loop: {told}"
    return ""


@pytest.mark.parametrize("path", DOORS)
def test_work_grows_with_the_body_and_no_faster(counted: Counted, demo: Server, path: str) -> None:
    base = DOORS[path][1]
    if path in EMBEDDING:
        counted = Counted(demo.serving)
    ways: list[Grown] = [
        lambda size, replaced=replaced, grow=grow: replaced(grow(size))  # type: ignore[misc]
        for _, inner, replaced in positions(*DOORS[path])
        for grow in ways_to_grow(inner)
    ]
    drawn = random.Random(path).sample(ways, min(NUM_DRAWN, len(ways)))
    drawn += [
        lambda size, name=name: {**base, name: copies({"role": "system", "content": "a"}, size)}  # type: ignore[misc]
        for name in TURNS
        if name in base
    ]
    wrong = [check_growth(counted, path, own) for own in drawn]
    assert [own for own in wrong if own] == []


@pytest.mark.parametrize("of", [lambda text: {"json": {"const": text}}, lambda text: {"choice": [text + "a", text]}])
def test_what_a_step_does_for_a_grammar_does_not_grow(demo: Server, of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with a text that must come, nor with the completions in one state."""
    work, tokens, add = [0], LongText.tokens, StepMasks.__init__

    def counted_tokens(own: LongText, *args: Any) -> Any:
        found = tokens(own, *args)
        work[0] += 1 + len(found or ())
        return found

    def counted_masks(*args: Any, **options: Any) -> None:
        work[0] += 1
        add(*args, **options)

    monkeypatch.setattr(LongText, "tokens", counted_tokens)
    monkeypatch.setattr(StepMasks, "__init__", counted_masks)
    found = []
    for size, n in ((2_000, 1), (40_000, 1), (40_000, 4)):
        work[0] = 0
        body = {"prompt": "a", "max_tokens": 64, "n": n, "structured_outputs": of("ab, " * (size // 4))}
        assert demo.post("/v1/completions", body).status == 200
        found.append(work[0])
    assert found[1] < 1.5 * found[0]
    assert found[2] < 2 * found[1]
