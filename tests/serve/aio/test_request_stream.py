"""RequestStream: what came is handed out once, in order, however it is taken."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.serve.aio.request_stream import MOST_UNREAD, Delta, RequestStream

from .toys import ShowingParams, script_engine

pytestmark = pytest.mark.anyio

TEXT = "naïve 🦜 语言 ✂️ end"


def steps(engine: LLMEngine, stream: RequestStream) -> list[list[Delta]]:
    """What each step brings."""
    engine.submit(stream.request)
    pieces = []
    while engine.has_unfinished:
        engine.step()
        pieces.append(stream.collect())
    return pieces


def open_stream(engine: LLMEngine, interval: int | None = 1, **params: Any) -> RequestStream:
    request = engine.make_request("?", ShowingParams(**{"max_tokens": 60, **params}))
    return RequestStream(request, asyncio.get_running_loop(), interval)


@pytest.mark.parametrize("interval", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("stop", [[], ["言 "], ["🦜 语", "end"], ["zebra", "ende"]], ids=str)
async def test_pieces_joined_are_the_text(interval: int, stop: list[str]) -> None:
    engine = script_engine(TEXT)
    stream = open_stream(engine, interval, stop=stop)
    pieces = steps(engine, stream)
    deltas = [delta for piece in pieces for delta in piece]
    [output] = stream.request.output().outputs
    assert "".join(delta.text for delta in deltas) == output.text
    assert [token for delta in deltas for token in delta.token_ids] == output.token_ids
    assert [entry for delta in deltas for entry in delta.logprobs or ()] == output.logprobs
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert all(delta.stop_reason is None for delta in deltas[:-1])
    assert deltas[-1].stop_reason == output.stop_reason
    sizes = [len(delta.token_ids) for delta in deltas]
    assert sizes[0] == 1, "the first is told at once"
    assert set(sizes[1:-1]) <= {interval}
    assert not stream.collect(), "nothing is told twice"


@pytest.mark.parametrize("seed", range(24))
async def test_however_it_is_delivered_and_taken_all_of_it_comes_in_order(seed: int) -> None:
    """Some deltas are taken at once, and only from a reader who waits."""
    rng = random.Random(seed)
    engine = script_engine(TEXT)

    stream, text, num_at_once = open_stream(engine, rng.choice((1, 3))), "", 0
    pieces, is_reading = steps(engine, stream), False

    def take_now(deltas: list[Delta]) -> bool:
        nonlocal text, num_at_once
        assert not is_reading
        if rng.random() < 0.3:
            return False
        text += "".join(delta.text for delta in deltas)
        num_at_once += 1
        return True

    async def take() -> None:
        nonlocal text, is_reading
        async for deltas in stream:
            assert deltas, "there is no news without news"
            is_reading = True
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            text += "".join(delta.text for delta in deltas)
            is_reading = False

    if seed % 2:
        stream.take_now = take_now
    reader = asyncio.create_task(take())
    for number, piece in enumerate(pieces, start=1):
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        assert not stream.is_over
        stream.deliver(piece, number == len(pieces))
    assert stream.is_over
    await reader
    assert bool(num_at_once) == bool(seed % 2)
    assert text == TEXT


async def test_what_nobody_reads_waits_in_the_sequences() -> None:
    """Only a few lists of deltas pile up; the reader still gets all, once."""
    engine = script_engine("a" * 500)

    stream = open_stream(engine, max_tokens=400)
    engine.submit(stream.request)
    num_lists, text = 0, ""
    while engine.has_unfinished:
        engine.step()
        if piece := stream.collect():
            num_lists += 1
            stream.deliver(piece, stream.request.finished)
    async for deltas in stream:
        text += "".join(delta.text for delta in deltas)
    assert num_lists == MOST_UNREAD + 1
    assert text == stream.request.output().outputs[0].text
    assert len(text) > MOST_UNREAD + 10


@pytest.mark.parametrize("interval", [1, 5, None])
async def test_each_completion_that_has_begun_is_told_once_whoever_reads(interval: int | None) -> None:
    """One after the other begins; of the first, more than MOST_UNREAD lists wait when the second does."""
    engine = script_engine("a" * 200, max_num_seqs=1)

    begun: list[int] = []
    request = engine.make_request("?", ShowingParams(max_tokens=99, n=3))
    stream = RequestStream(
        request, asyncio.get_running_loop(), interval, lambda: begun.append(engine.scheduler.num_steps)
    )
    engine.submit(request)
    while engine.has_unfinished:
        engine.step()
        if piece := stream.collect():
            stream.deliver(piece, request.finished)
    assert begun == [1, 100, 199]


async def test_an_error_comes_behind_what_was_told_before_it() -> None:
    stream = open_stream(script_engine(TEXT))
    delta = Delta(0, "text", [1], None, None, None)
    stream.deliver([delta], False)
    stream.deliver([], True, LookupError("gone"))
    stream.deliver([delta], True)
    assert await anext(stream) == [delta]
    for _ in range(2):
        with pytest.raises(LookupError):
            await anext(stream)
    with pytest.raises(LookupError):
        await stream.end()


async def test_a_reader_that_gave_up_waiting_is_not_woken() -> None:
    stream = open_stream(script_engine(TEXT))
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    reader.cancel()
    stream.deliver([Delta(0, "text", [1], None, "stop", None)], True)
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert [delta.text for deltas in [await anext(stream)] for delta in deltas] == ["text"]
