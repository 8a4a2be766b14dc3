"""Processes are killed, stopped and replaced: requests do not notice. The engines have no tensors."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nanoengine import AsyncLLMEngine
from nanoengine.core.sequence import Request
from nanoengine.errors import EngineClosed, EngineDead
from nanoengine.features.observability.observer import Observer
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.scale.replicas import slots, supervisor
from nanoengine.scale.replicas.engine import ReplicatedEngine
from nanoengine.scale.replicas.observer import ReplicaObserver
from nanoengine.scale.replicas.slots import ReplicaProcess

from .toy_process import DIES_AT_START, ENDLESS, LOSES_A_RANK, ToyCarrier, toy_replicas
from .world import answers, draw_requests, expected

PATIENCE = 30.0
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PARAMS = SamplingParams(n=2, seed=11, max_tokens=14, ignore_eos=True)


@contextmanager
def replicas(count: int = 2, carrier: ToyCarrier | None = None, **options: Any) -> Iterator[ReplicatedEngine]:
    engine = toy_replicas(count, carrier, **options)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "RETRY_SECONDS", (0.0, 0.01))
    monkeypatch.setattr(supervisor, "PING_SECONDS", 0.1)


def run(engine: ReplicatedEngine, requests: list[Request], after: Callable[[], object] = lambda: None) -> list[Any]:
    for request in requests:
        engine.submit(request)
    end = time.monotonic() + PATIENCE
    while engine.has_unfinished:
        engine.step()
        after()
        assert time.monotonic() < end, "the requests do not come to an end"
    return answers(requests)


def busy(engine: ReplicatedEngine) -> list[ReplicaProcess]:
    """Replicas that have requests."""
    found = [slot.current for slot in engine.supervisor.slots if slot.current is not None]
    return [process for process in found if engine.fleet.num_running(process.key)]


def signal_all(processes: list[ReplicaProcess], number: signal.Signals) -> None:
    for process in processes:
        os.kill(process.started.process.pid, number)  # type: ignore[attr-defined]


def wait_for(engine: ReplicatedEngine, is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        engine.supervisor.watch()
        assert time.monotonic() < end, "it does not come to that"


def plain(engine: ReplicatedEngine) -> Request:
    return engine.make_request(PROMPT, PARAMS)


def test_a_kill_after_some_tokens_changes_nothing() -> None:
    with replicas() as engine:
        want = run(engine, [plain(engine)])
        assert engine.supervisor.num_lost == 0
        for count in (1, 5, 9, 13):
            request, is_killed = plain(engine), []

            def kill(request: Request = request, count: int = count, killed: list[int] = is_killed) -> None:
                if not killed and len(request.sequences[0].output_token_ids) >= count and not request.finished:
                    signal_all(busy(engine), signal.SIGKILL)
                    killed.append(1)

            assert run(engine, [request], kill) == want
        assert engine.supervisor.num_lost >= 3
        assert engine.fleet.num_moves >= 3


def test_a_step_that_never_ends_loses_its_replica_and_others_go_on() -> None:
    want = expected(2)
    with replicas(2, replica_silence_seconds=5.0, replica_step_seconds=0.3) as engine:
        bad = engine.make_request([*ENDLESS, *PROMPT], SamplingParams(max_tokens=5))
        run(engine, [bad])
        assert isinstance(bad.error, EngineDead)
        assert "replicas were lost" in str(bad.error)
        assert run(engine, draw_requests(engine, 2)) == want


def test_a_replica_that_has_lost_a_rank_says_which() -> None:
    want = expected(2)
    with replicas(1) as engine:
        bad = engine.make_request([*LOSES_A_RANK, *PROMPT], SamplingParams(max_tokens=5))
        run(engine, [bad])
        assert isinstance(bad.error, EngineDead)
        assert "rank 1 is gone" in str(engine.supervisor.failure)
        assert run(engine, draw_requests(engine, 2)) == want


def test_a_first_start_that_fails_is_an_error() -> None:
    with pytest.raises(ValueError, match="non-negative"):  # of the first sleep
        toy_replicas(1, ToyCarrier(seconds=-2.0))
    with pytest.raises(EngineDead, match="while it started"):
        toy_replicas(1, ToyCarrier(seconds=DIES_AT_START))


def test_nobody_is_left_behind() -> None:
    carrier = ToyCarrier()
    with replicas(2, carrier) as engine:
        pids = [started.process for started in carrier.started]
    assert all(process.returncode is not None for process in pids)
    with pytest.raises(EngineClosed):
        engine.submit(plain(engine))
    for is_ready in (False, True):
        started = carrier.start(0)  # whose front dies
        if is_ready:
            assert started.socket.recv(1)
            time.sleep(0.2)  # all of that message is sent: nothing but an end can tell it
        started.socket.close()
        assert started.process.wait(PATIENCE) == 0


def test_what_is_counted_goes_on_when_a_replica_is_lost() -> None:
    with replicas(2) as engine:
        observer = ReplicaObserver(Observer(engine.max_model_len), engine.supervisor)
        want = run(engine, draw_requests(engine, 4))
        num_tokens = sum(len(tokens) for tokens, *_ in want)
        first = observer.snapshot(engine)
        assert first.times.num_generated_tokens == num_tokens
        assert first.num_requests == 10
        assert first.finished == Counter(reason for *_, reason, _ in want)
        assert first.num_blocks == 800
        assert first.times.latency.count == len(want)
        [slot, _] = engine.supervisor.slots
        lost = slot.current
        assert lost is not None
        signal_all([lost], signal.SIGKILL)
        wait_for(engine, lambda: slot.current not in (lost, None))
        assert run(engine, draw_requests(engine, 4)) == want
        second = observer.snapshot(engine)
        assert second.times.num_generated_tokens == 2 * num_tokens
        assert (second.num_requests, second.num_blocks, second.num_running) == (20, 800, 0)
        assert second.max_model_len == first.max_model_len
        by_replica = observer.snapshots(engine)
        assert list(by_replica) == ["0", "1"]
        assert sum(own.times.num_generated_tokens for own in by_replica.values()) == 2 * num_tokens
        assert observer.view(engine).pool.num_blocks == 800


# ---- on an event loop


async def read(engine: AsyncLLMEngine, slowly: float = 0.0, at: Callable[[int], object] = lambda _: None) -> list[Any]:
    """What a client gets: (tokens, text) of each completion."""
    got: list[list[Any]] = [[[], "", None] for _ in range(PARAMS.n)]
    async for delta in engine.generate(PROMPT, PARAMS):
        own = got[delta.index]
        own[0] += delta.token_ids
        own[1] += delta.text
        own[2] = delta.finish_reason
        at(len(own[0]))
        await asyncio.sleep(slowly)
    return got


def test_streams_slow_readers_and_aborts_during_a_move() -> None:
    engine = AsyncLLMEngine(lambda: toy_replicas(2, ToyCarrier(0.01)))
    own = engine.engine
    assert isinstance(own, ReplicatedEngine)

    async def all_of_it() -> None:
        want = await read(engine)
        assert [len(tokens) for tokens, *_ in want] == [14, 14]

        def kill(count: int) -> None:
            if count == 5:
                signal_all(busy(own), signal.SIGKILL)

        assert await asyncio.gather(read(engine, 0.02), read(engine, 0.0, kill), read(engine, 0.04)) == [want] * 3
        request = engine.make_request(PROMPT, PARAMS)
        stream = engine.submit(request)
        first = await anext(stream)
        assert first
        signal_all(busy(own), signal.SIGKILL)
        engine.cancel(stream)
        await stream.end()
        assert {seq.finish_reason for seq in request.sequences} == {"abort"}
        assert await read(engine) == want
        assert engine.num_waiting == 0
        assert await engine.call(lambda core: core.reset_prefix_cache())

    try:
        asyncio.run(all_of_it())
        assert own.supervisor.num_lost >= 2
        assert engine.error is None
    finally:
        engine.close()
    assert not own.fleet.running


def test_a_replica_that_is_lost_while_nothing_runs_is_replaced() -> None:
    engine = AsyncLLMEngine(lambda: toy_replicas(1))
    own = engine.engine
    assert isinstance(own, ReplicatedEngine)
    try:
        [slot] = own.supervisor.slots
        first = slot.current
        assert first is not None
        signal_all([first], signal.SIGKILL)
        end = time.monotonic() + PATIENCE
        while slot.current in (first, None):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert asyncio.run(read(engine))[0][2] == "length"
    finally:
        engine.close()
