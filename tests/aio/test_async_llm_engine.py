"""AsyncLLMEngine: the tokens of a blocking engine for many at once, and an end for everybody who waits, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from functools import wraps
from typing import Any, TypeVar

import pytest

import nanoengine
from nanoengine.aio.async_llm_engine import AsyncLLMEngine
from nanoengine.aio.request_stream import Delta, RequestStream
from nanoengine.core.errors import (
    EngineClosed,
    InvalidConfig,
    InvalidPrompt,
    InvalidRequest,
    InvalidSamplingParams,
    StepFailed,
)
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.outputs import CompletionOutput
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Request
from nanoengine.errors import EngineDead
from nanoengine.sampling.params import SamplingParams
from tests.core.toys import VOCAB, ToyModel, make_engine
from tests.core.toys import run as run_engine

from .toys import PATIENCE, POISON, Poisoned, StepGate, assert_idle, expected, greedy

T = TypeVar("T")

LONG = greedy(40)
Make = Callable[..., tuple[AsyncLLMEngine, StepGate]]


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(coroutine, PATIENCE)

    return asyncio.run(bounded())


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test that is a coroutine."""

    @wraps(test)
    def runs(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    return runs


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes engines around toys, whose invariants are checked after each step."""
    made: list[tuple[AsyncLLMEngine, StepGate]] = []

    def make_one(engine: LLMEngine | None = None, **options: Any) -> tuple[AsyncLLMEngine, StepGate]:
        own = make_engine(**options) if engine is None else engine
        gate = StepGate(own)
        made.append((AsyncLLMEngine(lambda: own), gate))
        return made[-1]

    yield make_one
    for engine, gate in made:
        gate.open()
        engine.close()


class BestOf(SamplingParams):
    @property
    def num_sequences(self) -> int:
        return 2


def test_the_package_has_it_by_name() -> None:
    assert nanoengine.AsyncLLMEngine is AsyncLLMEngine
    assert "AsyncLLMEngine" in nanoengine.__all__


def ask(engine: AsyncLLMEngine, *prompt: int, interval: int | None = 1, request_id: str | None = None) -> RequestStream:
    """A long answer."""
    return engine.submit(engine.make_request(list(prompt), LONG, request_id), interval)


async def held(gate: StepGate) -> None:
    await asyncio.to_thread(gate.wait_until_held)


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def read(stream: RequestStream) -> list[Delta]:
    return [delta async for deltas in stream for delta in deltas]


def tokens_of(deltas: list[Delta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


def reasons_of(deltas: list[Delta]) -> list[str]:
    return [delta.finish_reason for delta in deltas if delta.finish_reason is not None]


def nothing(engine: LLMEngine) -> None:
    """A function to call in the engine's thread."""


async def check_idle(engine: AsyncLLMEngine) -> None:
    await engine.call(assert_idle)


# ---- the same as from a blocking engine


def drawn_requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts, some of which begin alike, and all that changes what comes back."""
    rng = random.Random(5)
    requests = []
    for i in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 7, 30)))] if i % 3 else list(range(i + 1))
        params = SamplingParams(
            seed=i, n=rng.choice((1, 1, 3)), max_tokens=rng.randrange(1, 24), stop=rng.choice(([], ["e"], ["th", "z"]))
        )
        requests.append((prompt, params))
    return requests


@pytest.fixture(scope="module")
def answers() -> list[list[CompletionOutput]]:
    engine = make_engine()
    requests = [engine.make_request(*request) for request in drawn_requests(30)]
    run_engine(engine, requests)
    return [request.output().outputs for request in requests]


def check_deltas(deltas: list[Delta], outputs: list[CompletionOutput]) -> None:
    """The pieces of a request, put together."""
    for output in outputs:
        own = [delta for delta in deltas if delta.index == output.index]
        assert tokens_of(own, output.index) == output.token_ids
        assert "".join(delta.text for delta in own) == output.text
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + [output.finish_reason]
        assert own[-1].stop_reason == output.stop_reason


@pytest.mark.parametrize("interval", [1, 3, 1000, None])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 20, "depth": 2, "policy": "mixed"}], ids=["large", "small"])
def test_many_at_once_get_what_a_blocking_engine_gives(
    make: Make, answers: list[list[CompletionOutput]], interval: int | None, options: dict[str, Any]
) -> None:
    """An interval changes the pieces and not their sum."""
    engine, _ = make(**options)

    async def main() -> list[tuple[list[Delta], list[CompletionOutput]]]:
        requests = [engine.make_request(*request) for request in drawn_requests(30)]
        streams = [engine.submit(request, interval) for request in requests]
        pieces = await asyncio.gather(*map(read, streams))
        await check_idle(engine)
        return list(zip(pieces, [request.output().outputs for request in requests], strict=True))

    for (deltas, outputs), wanted in zip(run(main()), answers, strict=True):
        assert outputs == wanted
        if interval is None:
            assert not deltas
            continue
        check_deltas(deltas, wanted)
        for index in range(len(outputs)):
            own = [delta for delta in deltas if delta.index == index]
            assert all(len(delta.token_ids) >= interval for delta in own[1:-1])


def test_two_event_loops_at_once(make: Make, answers: list[list[CompletionOutput]]) -> None:
    engine, _ = make()
    found: dict[int, list[list[Delta]]] = {}

    async def every_other(start: int) -> None:
        requests = drawn_requests(30)[start::2]
        found[start] = await asyncio.gather(*(collect(engine.generate(*request)) for request in requests))

    threads = [threading.Thread(target=run, args=(every_other(start),)) for start in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for start in (0, 1):
        for deltas, outputs in zip(found[start], answers[start::2], strict=True):
            check_deltas(deltas, outputs)


# ---- readers


@in_loop
async def test_a_slow_reader_loses_nothing_and_holds_nobody_up(make: Make) -> None:
    engine, _ = make()
    slow, quick = ask(engine, 1, 2, 3), ask(engine, 4, 5, 6)
    assert tokens_of(await read(quick)) == expected(4, 5, 6)
    while not slow.is_over:
        await asyncio.sleep(0)
    deltas = await anext(slow)
    assert (tokens_of(deltas), reasons_of(deltas)) == (expected(1, 2, 3), ["length"])
    with pytest.raises(StopAsyncIteration):
        await anext(slow)


# ---- aborts


@in_loop
async def test_abort_before_the_start_in_the_middle_and_after_the_end(make: Make) -> None:
    engine, gate = make(max_num_seqs=1)
    gate.shut()
    running, waiting = ask(engine, 1, 2, 3, request_id="running"), ask(engine, 4, 5, 6, request_id="waiting")
    gate.let(3)
    await held(gate)
    assert engine.num_waiting == 1
    for request_id in ("waiting", "running", "nobody"):
        engine.abort(request_id)
    gate.let()  # the step before which it stood
    assert reasons_of(await read(waiting)) == ["abort"]
    deltas = await read(running)
    assert (tokens_of(deltas), reasons_of(deltas)) == (expected(1, 2, 3, max_tokens=4), ["abort"])
    await check_idle(engine)
    assert gate.num_steps == 4
    engine.abort("running")
    again = engine.submit(engine.make_request([1, 2, 3], greedy(3), "running"))
    gate.open()
    assert tokens_of(await read(again)) == expected(1, 2, 3, max_tokens=3)


@pytest.mark.parametrize("way", ["closed", "cancelled"])
@in_loop
async def test_a_generator_that_is_left_early_aborts_within_one_step(make: Make, way: str) -> None:
    engine, gate = make()
    gate.shut()
    gate.let(2)
    generator = engine.generate([1, 2, 3], greedy(40, n=3))
    if way == "closed":
        async with aclosing(generator) as deltas:
            await anext(deltas)
            await held(gate)  # before its third step
    else:
        reader = asyncio.create_task(collect(generator))
        await held(gate)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
    gate.let()
    await check_idle(engine)
    assert gate.num_steps == 3


@pytest.mark.parametrize("interval", [1, 5])
def test_requests_of_a_loop_that_is_closed_are_aborted(make: Make, interval: int) -> None:
    engine, gate = make()

    async def leave() -> None:
        ask(engine, 1, 2, 3, interval=interval)
        engine.submit(engine.make_request([1, 2, 3, 4], greedy(50, n=2)), interval)

    async def stay() -> None:
        deltas = await collect(engine.generate([4, 5, 6], greedy(20)))
        assert tokens_of(deltas) == expected(4, 5, 6, max_tokens=20)
        await check_idle(engine)

    gate.shut()
    run(leave())
    gate.open()
    run(stay())
    assert gate.num_steps <= 22, "nobody waits for the others"


# ---- mistakes


@in_loop
async def test_bad_requests_never_reach_the_engine(make: Make) -> None:
    engine, gate = make()
    with pytest.raises(InvalidPrompt):
        await collect(engine.generate([]))
    with pytest.raises(InvalidSamplingParams, match="best_of"):
        await collect(engine.generate([1], BestOf()))
    await check_idle(engine)
    assert gate.num_steps == 0


@pytest.mark.parametrize("way", ["told", "cancelled"])
@in_loop
async def test_an_id_in_use_is_refused_and_the_first_request_goes_on(make: Make, way: str) -> None:
    """It is not aborted by whoever was refused, and has left."""
    engine, gate = make()
    gate.shut()
    first = ask(engine, 1, 2, 3, request_id="same")
    await held(gate)
    second = asyncio.create_task(collect(engine.generate([4, 5, 6], LONG, request_id="same")))
    while engine.num_waiting < 2:
        await asyncio.sleep(0)
    if way == "cancelled":
        second.cancel()
    gate.open()
    with pytest.raises(InvalidRequest if way == "told" else asyncio.CancelledError):
        await second
    assert tokens_of(await read(first)) == expected(1, 2, 3)
    await check_idle(engine)
    assert engine.num_waiting == 0


class Broken(PolicyPart):
    """It raises, which it must not."""

    def submitted(self, request: Request) -> None:
        if request.client == "bad":
            raise LookupError("no such client")

    def finished(self, seq: Any) -> None:
        if seq.request.client == "worse":
            raise LookupError("broken listener")


@in_loop
async def test_an_exception_at_submit_reaches_its_reader_and_the_engine_lives_on(make: Make) -> None:
    engine, _ = make(parts=[Broken()])
    with pytest.raises(LookupError, match="no such client"):
        await collect(engine.generate([1, 2, 3], LONG, client="bad", request_id="same"))
    await check_idle(engine)
    deltas = await collect(engine.generate([1, 2, 3], LONG, client="good", request_id="same"))
    assert tokens_of(deltas) == expected(1, 2, 3)
    await check_idle(engine)


@in_loop
async def test_what_a_called_function_raises_is_its_callers_unless_it_has_left(make: Make) -> None:
    engine, gate = make()

    def fail(own: LLMEngine) -> None:
        raise LookupError(f"{own.vocab_size}")

    with pytest.raises(LookupError, match=f"{VOCAB}"):
        await engine.call(fail)
    assert await engine.call(lambda own: own.vocab_size) == VOCAB
    gate.shut()
    before = time.perf_counter()
    stream = ask(engine, 1)
    arrived = stream.request.arrival_time
    assert arrived is not None
    assert before <= arrived <= time.perf_counter(), "a request arrives when it is made"
    await held(gate)
    call = asyncio.create_task(engine.call(fail))
    await asyncio.sleep(0)
    call.cancel()
    gate.open()
    assert tokens_of(await read(stream)) == expected(1)


# ---- failures


def test_what_keeps_an_engine_from_being_made_is_raised() -> None:
    def fail() -> LLMEngine:
        raise InvalidConfig("no such engine")

    with pytest.raises(InvalidConfig, match="no such engine"):
        AsyncLLMEngine(fail)
    assert not [thread for thread in threading.enumerate() if thread.name == "nanoengine" and not thread.daemon]


@in_loop
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
@in_loop
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
@in_loop
async def test_close_while_requests_run_ends_them(make: Make, client: str) -> None:
    """The executor is closed though an abort raises."""
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
        if client:
            with pytest.raises(EngineDead, match="broken listener"):
                await stream.end()
        else:
            assert reasons_of(await read(stream)) == ["abort"]
    await closing
    assert engine.engine.executor.is_closed
    if not client:
        assert_idle(engine.engine)
        with pytest.raises(EngineClosed):
            await engine.call(nothing)
    engine.close()


@in_loop
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
@in_loop
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
