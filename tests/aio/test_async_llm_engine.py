"""AsyncLLMEngine: the tokens of a blocking engine for many at once, and an end for everybody who waits, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

import pytest

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
from nanoengine.core.sequence import Request
from nanoengine.errors import EngineDead
from nanoengine.sampling.params import SamplingParams
from tests.core.toys import VOCAB, ToyModel, make_engine
from tests.core.toys import run as run_engine

from .toys import PATIENCE, POISON, Poisoned, ShowingParams, StepGate, assert_idle, expected, greedy, script_engine

T = TypeVar("T")

LONG = greedy(40)
Make = Callable[..., tuple[AsyncLLMEngine, StepGate]]


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(coroutine, PATIENCE)

    return asyncio.run(bounded())


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
        else:
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


def test_a_token_is_there_before_the_next_is_computed(make: Make) -> None:
    engine, gate = make()

    async def main() -> None:
        gate.shut()
        stream = engine.submit(engine.make_request([1, 2, 3], LONG))
        for token in expected(1, 2, 3, max_tokens=5):
            gate.let()
            assert tokens_of(await anext(stream)) == [token]

    run(main())


def test_a_slow_reader_loses_nothing_and_holds_nobody_up(make: Make) -> None:
    engine, _ = make()

    async def main() -> None:
        slow = engine.submit(engine.make_request([1, 2, 3], LONG))
        quick = engine.submit(engine.make_request([4, 5, 6], LONG))
        assert tokens_of(await read(quick)) == expected(4, 5, 6)
        while not slow.is_over:
            await asyncio.sleep(0)
        deltas = await anext(slow)
        assert tokens_of(deltas) == expected(1, 2, 3)
        assert reasons_of(deltas) == ["length"]
        with pytest.raises(StopAsyncIteration):
            await anext(slow)

    run(main())


def test_thousands_of_tiny_requests(make: Make) -> None:
    engine, _ = make(script_engine(""))

    async def main() -> None:
        requests = [engine.make_request("?", ShowingParams(max_tokens=2)) for _ in range(3000)]
        streams = [engine.submit(request) for request in requests]
        for deltas in await asyncio.gather(*map(read, streams)):
            assert (tokens_of(deltas), reasons_of(deltas)) == ([0], ["stop"])
        await check_idle(engine)
        assert engine.num_waiting == 0

    run(main())


# ---- aborts


def test_abort_before_the_start_in_the_middle_and_after_the_end(make: Make) -> None:
    engine, gate = make(max_num_seqs=1)

    async def main() -> None:
        gate.shut()
        running = engine.submit(engine.make_request([1, 2, 3], LONG, "running"))
        waiting = engine.submit(engine.make_request([4, 5, 6], LONG, "waiting"))
        gate.let(3)
        gate.wait_until_held()
        assert engine.num_waiting == 1
        engine.abort("waiting")
        engine.abort("running")
        engine.abort("nobody")
        gate.let()  # the step before which it stood
        assert reasons_of(await read(waiting)) == ["abort"]
        deltas = await read(running)
        assert (tokens_of(deltas), reasons_of(deltas)) == (
            expected(1, 2, 3, max_tokens=4),
            ["abort"],
        )
        await check_idle(engine)
        assert gate.num_steps == 4
        engine.abort("running")
        again = engine.submit(engine.make_request([1, 2, 3], greedy(3), "running"))
        gate.open()
        assert tokens_of(await read(again)) == expected(1, 2, 3, max_tokens=3)

    run(main())


def test_a_generator_that_is_closed_early_aborts_within_one_step(make: Make) -> None:
    engine, gate = make()

    async def main() -> None:
        gate.shut()
        gate.let(2)
        async with aclosing(engine.generate([1, 2, 3], greedy(40, n=3))) as deltas:
            await anext(deltas)
            await asyncio.to_thread(gate.wait_until_held)  # before its third step
        gate.let()
        await check_idle(engine)
        assert gate.num_steps == 3

    run(main())


def test_a_cancelled_reader_aborts_its_request(make: Make) -> None:
    engine, gate = make()

    async def main() -> None:
        gate.shut()
        reader = asyncio.create_task(collect(engine.generate([1, 2, 3], LONG)))
        await asyncio.to_thread(gate.wait_until_held)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        gate.let()
        await check_idle(engine)

    run(main())


@pytest.mark.parametrize("interval", [1, 5])
def test_requests_of_a_loop_that_is_closed_are_aborted(make: Make, interval: int) -> None:
    engine, gate = make()

    async def leave() -> None:
        engine.submit(engine.make_request([1, 2, 3], LONG), interval)
        engine.submit(engine.make_request([1, 2, 3, 4], greedy(50, n=2)), interval)

    gate.shut()
    run(leave())
    gate.open()

    async def main() -> None:
        deltas = await collect(engine.generate([4, 5, 6], greedy(20)))
        assert tokens_of(deltas) == expected(4, 5, 6, max_tokens=20)
        await check_idle(engine)

    run(main())
    assert gate.num_steps <= 22, "nobody waits for the others"


# ---- mistakes


def test_bad_requests_never_reach_the_engine(make: Make) -> None:
    engine, gate = make()

    async def main() -> None:
        with pytest.raises(InvalidPrompt):
            await collect(engine.generate([]))
        with pytest.raises(InvalidSamplingParams, match="best_of"):
            await collect(engine.generate([1], BestOf()))
        await check_idle(engine)

    run(main())
    assert gate.num_steps == 0


def test_an_id_in_use_is_refused_and_the_first_request_goes_on(make: Make) -> None:
    engine, gate = make()

    async def main() -> None:
        gate.shut()
        first = engine.submit(engine.make_request([1, 2, 3], LONG, "same"))
        second = engine.submit(engine.make_request([4, 5, 6], LONG, "same"))
        gate.wait_until_held()
        gate.open()
        with pytest.raises(InvalidRequest, match="same"):
            await read(second)
        assert tokens_of(await read(first)) == expected(1, 2, 3)
        await check_idle(engine)
        assert engine.num_waiting == 0

    run(main())


def test_a_refused_id_is_not_aborted_by_whoever_was_refused(make: Make) -> None:
    engine, gate = make()

    async def main() -> None:
        gate.shut()
        first = engine.submit(engine.make_request([1, 2, 3], LONG, "same"))
        await asyncio.to_thread(gate.wait_until_held)
        second = asyncio.create_task(collect(engine.generate([4, 5, 6], LONG, request_id="same")))
        while engine.num_waiting < 2:
            await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        gate.open()
        assert tokens_of(await read(first)) == expected(1, 2, 3)

    run(main())


def test_an_exception_at_submit_reaches_its_reader_and_the_engine_lives_on(make: Make) -> None:
    class Picky:
        """A listener that raises, which it must not."""

        def submitted(self, request: Request) -> None:
            if request.client == "bad":
                raise LookupError("no such client")

        def after_step(self, step: object, result: object, seqs: object) -> None: ...

        def finished(self, seq: object) -> None: ...

    engine, _ = make(listeners=[Picky()])

    async def main() -> None:
        with pytest.raises(LookupError, match="no such client"):
            await collect(engine.generate([1, 2, 3], LONG, client="bad", request_id="same"))
        await check_idle(engine)
        deltas = await collect(engine.generate([1, 2, 3], LONG, client="good", request_id="same"))
        assert tokens_of(deltas) == expected(1, 2, 3)
        await check_idle(engine)

    run(main())


def test_what_a_called_function_raises_is_its_callers(make: Make) -> None:
    engine, _ = make()

    def fail(own: LLMEngine) -> None:
        raise LookupError(f"{own.vocab_size}")

    async def main() -> None:
        with pytest.raises(LookupError, match=f"{VOCAB}"):
            await engine.call(fail)
        assert await engine.call(lambda own: own.vocab_size) == VOCAB

    run(main())


def test_a_request_arrives_when_it_is_made(make: Make) -> None:
    engine, _ = make()
    before = time.perf_counter()
    request = engine.make_request([1], greedy(3))
    assert request.arrival_time is not None
    assert before <= request.arrival_time <= time.perf_counter()


def test_a_caller_who_has_left_is_not_answered(make: Make) -> None:
    engine, gate = make()

    async def main() -> None:
        gate.shut()
        stream = engine.submit(engine.make_request([1], LONG))
        await asyncio.to_thread(gate.wait_until_held)
        call = asyncio.create_task(engine.call(nothing))
        await asyncio.sleep(0)
        call.cancel()
        gate.open()
        assert tokens_of(await read(stream)) == expected(1)

    run(main())


# ---- failures


def test_what_keeps_an_engine_from_being_made_is_raised() -> None:
    def fail() -> LLMEngine:
        raise InvalidConfig("no such engine")

    with pytest.raises(InvalidConfig, match="no such engine"):
        AsyncLLMEngine(fail)
    assert not [thread for thread in threading.enumerate() if thread.name == "nanoengine" and not thread.daemon]


def test_a_failed_step_ends_its_requests_and_no_others(make: Make) -> None:
    engine, gate = make(model=Poisoned(4))

    async def main() -> None:
        gate.shut()
        good = engine.submit(engine.make_request([1, 2, 3], LONG))
        gate.let(2)
        await asyncio.to_thread(gate.wait_until_held)
        bad = engine.submit(engine.make_request([POISON, 2, 3], LONG))
        whole = engine.submit(engine.make_request([POISON, 4], LONG), interval=None)
        gate.open()
        for stream in (bad, whole):
            with pytest.raises(StepFailed, match="injected") as failure:
                await stream.end()
            assert isinstance(failure.value.__cause__, RuntimeError)
            assert failure.value.outputs[0].outputs[0].finish_reason == "error"
        assert tokens_of(await read(good)) == expected(1, 2, 3)
        assert tokens_of(await collect(engine.generate([7, 8], LONG))) == expected(7, 8)
        await check_idle(engine)

    run(main())


def test_an_engine_that_dies_tells_everybody(make: Make) -> None:
    engine, gate = make(max_num_seqs=2)

    async def main() -> None:
        gate.shut()
        streams = [engine.submit(engine.make_request([i], LONG), interval) for i, interval in enumerate((1, None, 5))]
        gate.let(2)
        await asyncio.to_thread(gate.wait_until_held)
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

    run(main())
    engine.close()
    engine.close()


def test_an_engine_that_cannot_even_be_closed_tells_everybody(make: Make) -> None:
    class Stubborn(ToyModel):
        def close(self) -> None:
            raise MemoryError("no room to close")

    engine, gate = make(model=Stubborn(4))

    async def main() -> None:
        gate.shut()
        stream = engine.submit(engine.make_request([1], LONG))
        await asyncio.to_thread(gate.wait_until_held)
        gate.error = SystemError("broken")
        gate.open()
        with pytest.raises(EngineDead, match="broken"):
            await stream.end()

    run(main())
    engine.close()
    assert isinstance(engine.error, SystemError)


def test_the_executor_is_closed_though_an_abort_raises(make: Make) -> None:
    class Broken:
        def submitted(self, request: object) -> None: ...

        def after_step(self, step: object, result: object, seqs: object) -> None: ...

        def finished(self, seq: object) -> None:
            raise LookupError("broken listener")

    engine, gate = make(listeners=[Broken()])

    async def main() -> None:
        gate.shut()
        streams = [engine.submit(engine.make_request([i], LONG)) for i in range(2)]
        await asyncio.to_thread(gate.wait_until_held)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        while not engine._is_closing:
            await asyncio.sleep(0)
        gate.open()
        for stream in streams:
            with pytest.raises(EngineDead, match="broken listener"):
                await stream.end()
        await closing

    run(main())
    assert engine.engine.executor.is_closed


# ---- the end


def test_close_while_requests_run_ends_them(make: Make) -> None:
    engine, gate = make(max_num_seqs=1)

    async def main() -> None:
        gate.shut()
        streams = [engine.submit(engine.make_request([i], LONG)) for i in range(3)]
        gate.let(2)
        await asyncio.to_thread(gate.wait_until_held)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        with contextlib.suppress(EngineClosed):
            while True:  # until it has begun to close; otherwise they might come to their ends first
                engine.make_request([1])
                await asyncio.sleep(0)
        gate.open()
        for stream in streams:
            assert reasons_of(await read(stream)) == ["abort"]
        await closing
        with pytest.raises(EngineClosed):
            engine.make_request([1])
        with pytest.raises(EngineClosed):
            await engine.call(nothing)

    run(main())
    assert_idle(engine.engine)
    assert engine.engine.executor.is_closed
    engine.close()


def test_a_message_that_comes_too_late_is_answered(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make()

    async def main() -> None:
        request = engine.make_request([1], LONG)
        await asyncio.to_thread(engine.close)
        monkeypatch.setattr(engine, "_check_alive", lambda: None)  # as it was a moment before
        with pytest.raises(EngineClosed):
            await engine.submit(request).end()
        with pytest.raises(EngineClosed):
            await engine.call(nothing)
        engine.abort(request.request_id)

    run(main())


# ---- anything


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_asked_for_every_stream_ends(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    engine, _ = make(
        model=Poisoned(4),
        num_blocks=rng.choice((20, 64)),
        max_num_seqs=rng.choice((1, 3, 8)),
        policy=rng.choice(("prefill_first", "mixed")),
        max_model_len=40,
    )

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

    async def main() -> None:
        readers: list[asyncio.Task[str]] = []
        ids: list[str] = []
        for _ in range(60):
            act = rng.random()
            if act < 0.5:
                prompt = [
                    POISON if rng.random() < 0.1 else rng.randrange(9),
                    *(rng.choices(range(9), k=rng.randrange(9))),
                ]
                params = SamplingParams(
                    max_tokens=rng.randrange(1, 25), n=rng.choice((1, 1, 2)), ignore_eos=True, seed=0
                )
                request = engine.make_request(prompt, params)
                stream = engine.submit(request, rng.choice((1, 4, None)))
                ids.append(request.request_id)
                if params.n == 1:
                    readers.append(asyncio.create_task(follow(stream, prompt)))
            elif act < 0.65 and ids:
                engine.abort(rng.choice(ids))
            elif act < 0.75:
                await engine.call(nothing)
            else:
                await asyncio.sleep(rng.choice((0, 0, 0.001)))
        if rng.random() < 0.3:
            await asyncio.to_thread(engine.close)
            reasons = await asyncio.gather(*readers)
            assert_idle(engine.engine)
        else:
            reasons = await asyncio.gather(*readers)
            for request_id in ids:  # of those that nobody reads
                engine.abort(request_id)
            await check_idle(engine)
        assert set(reasons) <= {"length", "abort", "error", "closed", "untold"}

    run(main())
