"""AsyncLLMEngine: an end for everybody who waits, whatever happens: failures, death, close."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading

import pytest

from nanoengine.core.errors import (
    EngineClosed,
    InvalidConfig,
    StepFailed,
)
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.errors import EngineDead
from nanoengine.serve.aio.async_llm_engine import AsyncLLMEngine
from nanoengine.serve.aio.request_stream import RequestStream
from tests.core.toys import ToyModel

from .asking import (
    LONG,
    Broken,
    Make,
    ask,
    check_idle,
    collect,
    held,
    nothing,
    read,
    reasons_of,
    tokens_of,
)
from .toys import POISON, Poisoned, assert_idle, expected, greedy

pytestmark = pytest.mark.anyio

# ---- failures


def test_what_keeps_an_engine_from_being_made_is_raised() -> None:
    def fail() -> LLMEngine:
        raise InvalidConfig("no such engine")

    with pytest.raises(InvalidConfig, match="no such engine"):
        AsyncLLMEngine(fail)
    assert not [thread for thread in threading.enumerate() if thread.name == "nanoengine" and not thread.daemon]


async def test_a_failed_step_ends_its_requests_and_no_others(make: Make) -> None:
    engine, gate = make(model=Poisoned(4))
    gate.shut()
    good = ask(engine, 1, 2, 3)
    gate.let(2)
    await held(gate)
    bad, whole = ask(engine, POISON, 2, 3), ask(engine, POISON, 4, interval=None)
    gate.open()
    for stream in (bad, whole):
        with pytest.raises(StepFailed, match="injected") as failure:
            await stream.end()
        assert isinstance(failure.value.__cause__, RuntimeError)
        assert failure.value.outputs[0].outputs[0].finish_reason == "error"
    assert tokens_of(await read(good)) == expected(1, 2, 3)
    assert tokens_of(await collect(engine.generate([7, 8], LONG))) == expected(7, 8)
    await check_idle(engine)


class Stubborn(ToyModel):
    def close(self) -> None:
        super().close()
        raise MemoryError("no room to close")


@pytest.mark.parametrize("model", [ToyModel, Stubborn])
async def test_an_engine_that_dies_tells_everybody(make: Make, model: type[ToyModel]) -> None:
    """Even one that cannot be closed."""
    engine, gate = make(max_num_seqs=2, model=model(4))
    gate.shut()
    streams = [ask(engine, i, interval=interval) for i, interval in enumerate((1, None, 5))]
    gate.let(2)
    await held(gate)
    call = asyncio.create_task(engine.call(nothing))
    await asyncio.sleep(0)
    gate.error = KeyboardInterrupt("enough")
    gate.open()
    for stream in streams:
        with pytest.raises(EngineDead, match="KeyboardInterrupt: enough") as death:
            await stream.end()
        assert death.value.__cause__ is gate.error
    with pytest.raises(EngineDead):
        await call
    for attempt in (engine.call(nothing), collect(engine.generate([1]))):
        with pytest.raises(EngineDead):
            await attempt
    with pytest.raises(EngineDead):
        engine.make_request([1])
    engine.abort("nobody")
    engine.close()
    engine.close()
    assert engine.error is gate.error


# ---- the end


@pytest.mark.parametrize("client", ["", "worse"])
async def test_close_while_requests_run_ends_them(make: Make, client: str) -> None:
    """Also if a part raises at each of their ends."""
    engine, gate = make(max_num_seqs=1, parts=[Broken()])
    gate.shut()
    streams = [engine.submit(engine.make_request([i], LONG, client=client)) for i in range(3)]
    gate.let(2)
    await held(gate)
    closing = asyncio.create_task(asyncio.to_thread(engine.close))
    with contextlib.suppress(EngineClosed):
        while True:  # until it has begun to close; otherwise they might come to their ends first
            engine.make_request([1])
            await asyncio.sleep(0)
    gate.open()
    for stream in streams:
        assert reasons_of(await read(stream)) == ["abort"]
    await closing
    assert engine.engine.executor.is_closed
    if not client:
        assert_idle(engine.engine)
        with pytest.raises(EngineClosed):
            await engine.call(nothing)
    engine.close()


async def test_a_message_that_comes_too_late_is_answered(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make()
    request = engine.make_request([1], LONG)
    await asyncio.to_thread(engine.close)
    monkeypatch.setattr(engine, "_check_alive", lambda: None)  # as it was a moment before
    with pytest.raises(EngineClosed):
        await engine.submit(request).end()
    with pytest.raises(EngineClosed):
        await engine.call(nothing)
    engine.abort(request.request_id)


# ---- anything


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_is_asked_for_every_stream_ends(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    sizes = {"num_blocks": rng.choice((20, 64)), "max_num_seqs": rng.choice((1, 3, 8)), "max_model_len": 40}
    engine, _ = make(model=Poisoned(4), policy=rng.choice(("prefill_first", "mixed")), **sizes)

    async def follow(stream: RequestStream, prompt: list[int]) -> str:
        try:
            deltas = await read(stream)
        except StepFailed:
            return "error"
        except EngineClosed:  # it had not even been begun
            return "closed"
        tokens = tokens_of(deltas)
        if stream.interval is not None:
            assert tokens == expected(*prompt)[: len(tokens)]
        return (reasons_of(deltas) or ["untold"])[-1]

    readers: list[asyncio.Task[str]] = []
    ids: list[str] = []
    for _ in range(60):
        act = rng.random()
        if act < 0.5:
            first = POISON if rng.random() < 0.1 else rng.randrange(9)
            prompt = [first, *rng.choices(range(9), k=rng.randrange(9))]
            request = engine.make_request(prompt, greedy(rng.randrange(1, 25), n=rng.choice((1, 1, 2))))
            stream = engine.submit(request, rng.choice((1, 4, None)))
            ids.append(request.request_id)
            if len(request.sequences) == 1:
                readers.append(asyncio.create_task(follow(stream, prompt)))
        elif act < 0.65 and ids:
            engine.abort(rng.choice(ids))
        elif act < 0.75:
            await engine.call(nothing)
        else:
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
    closes = rng.random() < 0.3
    if closes:
        await asyncio.to_thread(engine.close)
    reasons = await asyncio.gather(*readers)
    if closes:
        assert_idle(engine.engine)
    else:
        for request_id in ids:  # of those that nobody reads
            engine.abort(request_id)
        await check_idle(engine)
    assert set(reasons) <= {"length", "abort", "error", "closed", "untold"}
