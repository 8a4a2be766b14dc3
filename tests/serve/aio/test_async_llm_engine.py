"""AsyncLLMEngine: the tokens of a blocking engine for many at once; readers, aborts, mistakes."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing
from typing import Any

import pytest

from nanoengine.core.errors import (
    InvalidPrompt,
    InvalidRequest,
    InvalidSamplingParams,
)
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.outputs import CompletionOutput
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.serve.aio.async_llm_engine import MOST_MESSAGES
from nanoengine.serve.aio.request_stream import Delta
from tests.core.toys import VOCAB, make_engine
from tests.core.toys import run as run_engine

from .asking import (
    LONG,
    Broken,
    Make,
    ask,
    check_idle,
    collect,
    held,
    read,
    reasons_of,
    tokens_of,
)
from .toys import PATIENCE, expected, greedy

pytestmark = pytest.mark.anyio


class BestOf(SamplingParams):
    @property
    def num_sequences(self) -> int:
        return 2


async def test_a_client_with_many_requests_holds_no_other_up(make: Make) -> None:
    """Before each step comes a call of each client in turn."""
    engine, gate = make()
    gate.shut()
    ask(engine, 1)
    await held(gate)
    submit = engine.submit
    many = [
        submit(engine.make_request([2, number % VOCAB], LONG, client="many")) for number in range(4 * MOST_MESSAGES)
    ]
    one = submit(engine.make_request([3], LONG, client="one"))
    gate.let()
    await held(gate)
    assert one.request.sequences, "it was heard before the next step"
    assert not many[-1].request.sequences
    gate.open()
    for stream in (*many, one):
        await read(stream)
    await check_idle(engine)


@pytest.mark.parametrize("seed", range(4))
async def test_what_raises_in_one_stream_takes_the_news_of_no_other(make: Make, seed: int) -> None:
    """Whichever of its functions it is: the reader of that stream gets the error, and all others every token."""
    rng = random.Random(seed)
    faults = rng.sample(["", "", "begun", "take_now", "collect", *rng.choices(["", "begun", "take_now"], k=3)], 8)
    engine, gate = make()
    gate.shut()

    def raises(*_: Any) -> Any:
        raise LookupError(fault)

    streams = []
    for number, fault in enumerate(faults, start=1):
        request = engine.make_request([number], LONG)
        streams.append(engine.submit(request, begun=raises if fault == "begun" else lambda: None))
        if fault in ("take_now", "collect"):
            setattr(streams[-1], fault, raises)
    gate.open()
    async with asyncio.timeout(PATIENCE):
        found = await asyncio.gather(*map(read, streams), return_exceptions=True)
    for number, (fault, own) in enumerate(zip(faults, found, strict=True), start=1):
        assert isinstance(own, LookupError) if fault else tokens_of(own) == expected(number)  # type: ignore[arg-type]
    for stream in streams:
        engine.cancel(stream)
    await check_idle(engine)


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
async def test_many_at_once_get_what_a_blocking_engine_gives(
    make: Make, answers: list[list[CompletionOutput]], interval: int | None, options: dict[str, Any]
) -> None:
    """An interval changes the pieces and not their sum."""
    engine, _ = make(**options)
    requests = [engine.make_request(*request) for request in drawn_requests(30)]
    pieces = await asyncio.gather(*[read(engine.submit(request, interval)) for request in requests])
    await check_idle(engine)
    for deltas, request, wanted in zip(pieces, requests, answers, strict=True):
        assert request.output().outputs == wanted
        if interval is None:
            assert sorted(delta.index for delta in deltas) == [output.index for output in wanted], "only the first"
            continue
        check_deltas(deltas, wanted)
        for index in range(len(wanted)):
            own = [delta for delta in deltas if delta.index == index]
            assert all(len(delta.token_ids) >= interval for delta in own[1:-1])


# ---- aborts


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
    asyncio.run(leave())
    gate.open()
    asyncio.run(stay())
    assert gate.num_steps <= 22, "nobody waits for the others"


# ---- mistakes


async def test_bad_requests_never_reach_the_engine(make: Make) -> None:
    engine, gate = make()
    with pytest.raises(InvalidPrompt):
        await collect(engine.generate([]))
    with pytest.raises(InvalidSamplingParams, match="best_of"):
        await collect(engine.generate([1], BestOf()))
    await check_idle(engine)
    assert gate.num_steps == 0


@pytest.mark.parametrize("way", ["told", "cancelled"])
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


async def test_an_exception_at_submit_reaches_its_reader_and_the_engine_lives_on(make: Make) -> None:
    engine, _ = make(parts=[Broken()])
    with pytest.raises(LookupError, match="no such client"):
        await collect(engine.generate([1, 2, 3], LONG, client="bad", request_id="same"))
    await check_idle(engine)
    deltas = await collect(engine.generate([1, 2, 3], LONG, client="good", request_id="same"))
    assert tokens_of(deltas) == expected(1, 2, 3)
    await check_idle(engine)


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
