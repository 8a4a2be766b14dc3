"""Whatever a replica does in place of what it should, at whatever moment: the front lives, and requests go on in another one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from nanoengine.core.sequence import Request
from nanoengine.errors import EngineDead
from nanoengine.features.observability.kv_events import KVEventPublisher
from nanoengine.scale.replicas import fleet, slots, supervisor
from nanoengine.scale.replicas.engine import ReplicatedEngine
from nanoengine.scale.replicas.messages import CompletionDelta, End, Failed, Ping, Pong, Ready, StepUpdate
from nanoengine.scale.replicas.options import ReplicaOptions
from nanoengine.scale.replicas.replica import Replica
from nanoengine.serve.server.config import ServerConfig
from nanoengine.serve.server.served_model import ServedModel
from tests.core.toys import ToyModel, make_engine
from tests.scale.worker.peers import FAULTS, Fault, Peer, dead, silent
from tests.serve.aio.toys import LogprobListener

from .test_processes import plain, run, wait_for
from .world import BLOCK_SIZE, HASH_SEED, answers, draw_requests, expected, new_blocks, replicated

READY = Ready(60, HASH_SEED, "toys")


def ready_again(own: Connection) -> None:
    own.send(READY)
    silent(own)


def fails_late(own: Connection) -> None:
    own.send(Failed(RuntimeError("now?")))
    silent(own)


def news_of_nobody(own: Connection) -> None:
    """Of a completion that its request does not have, for all keys that there may be."""
    own.send(StepUpdate([CompletionDelta(key, 99, 0, [1], "b", None, 0, None) for key in range(1, 500)]))
    silent(own)


def no_news(own: Connection) -> None:
    own.send(StepUpdate(deltas=7, changes=None))  # type: ignore[arg-type]
    silent(own)


AT_START: tuple[Fault, ...] = (*FAULTS, fails_late, no_news)
AT_WORK: tuple[Fault, ...] = (*FAULTS, ready_again, fails_late, news_of_nobody, no_news)


class Life:
    """What a replica without tensors does, in a thread.

    Args:
        at: when its fault comes: -2 at the beginning, -1 behind its first sign of life, then by the number of its steps.
    """

    def __init__(self, at: int = 0, fault: Fault | None = None):
        self.at, self.fault = at, fault

    def __call__(self, own: Connection) -> None:
        fails: Mapping[int, Fault] = {} if self.fault is None else {self.at: self.fault}
        if -2 in fails:
            return fails[-2](own)
        own.send(Pong(0.0))
        if -1 in fails:
            return fails[-1](own)
        own.send(READY)
        events, count = KVEventPublisher(), 0
        blocks = new_blocks(stores=[events])
        replica = Replica(make_engine(blocks=blocks, model=ToyModel(BLOCK_SIZE), parts=[LogprobListener()]), events)
        while True:
            while own.poll(0.0 if replica.engine.has_unfinished else None):
                message = own.recv()
                if isinstance(message, End):
                    return None
                if isinstance(message, Ping):
                    own.send(Pong(0.0))
                replica.receive(message)
                if isinstance(message, Ping):
                    break
            if count in fails and replica.engine.has_unfinished:
                return fails[count](own)
            count += replica.engine.has_unfinished
            if (news := replica.step()) is not None:
                own.send(news)


class PeerCarrier:
    """Starts such replicas, by their places one after the other; behind them all are without faults.

    Args:
        failing: numbers of the starts that fail, from 0.
    """

    def __init__(self, *lives: Life, failing: Any = ()):
        self.lives, self.failing, self.num_starts = list(lives), failing, 0
        self.waits: dict[int, str] = {}

    def start(self, number: int) -> Peer:
        self.num_starts += 1
        if self.num_starts - 1 in self.failing:
            raise RuntimeError("no room for it")
        return Peer(self.lives.pop(0) if self.lives else Life())

    def close(self) -> None: ...


@contextmanager
def replicas(own: Any, count: int = 1, **options: Any) -> Iterator[ReplicatedEngine]:
    engine = replicated(own, ReplicaOptions(replicas=count, **options))
    try:
        yield engine
    finally:
        engine.supervisor.close(1.0)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "RETRY_SECONDS", (0.0, 0.01))
    monkeypatch.setattr(supervisor, "START_SILENCE_SECONDS", 0.1)


@pytest.mark.parametrize("seed", range(6))
def test_drawn_faults_lose_the_replica_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MOST_LOSSES", 1000)  # no request is to blame
    rng = random.Random(seed)
    count, lives = rng.choice([1, 2]), []
    for _ in range(10):  # one that works follows each that does not start: none is hopeless
        lives += [Life(rng.randint(1, 4), rng.choice(AT_WORK)), Life(rng.randint(-2, -1), rng.choice(AT_START))]
    own = PeerCarrier(*(Life(rng.randint(1, 4), rng.choice(AT_WORK)) for _ in range(count)), *lives[1:])
    with replicas(own, count, replica_silence_seconds=0.1, replica_start_attempts=1000) as engine:
        done = 0
        while own.lives:  # until all faults have come
            assert run(engine, draw_requests(engine, seed)) == expected(seed)
            done += 1
            assert done < 100
        assert engine.supervisor.num_lost >= len(lives) - count
        assert run(engine, [plain(engine)])


def keys(engine: ReplicatedEngine) -> list[int]:
    return [slot.current.key for slot in engine.supervisor.slots if slot.current is not None]


def test_a_start_has_two_limits() -> None:
    """Of silence, and of all of it: who loads for long, and says so, may."""

    def loads(own: Connection) -> None:
        while True:
            own.send(Pong(0.0))
            time.sleep(0.05)

    with pytest.raises(EngineDead, match=r"replica 0 was not ready within replica_start_seconds=0\.3 while it started"):
        replicas(PeerCarrier(Life(-2, loads)), replica_start_seconds=0.3).__enter__()
    message = r"replica 0 has given no sign of life for 0\.1 seconds \(replica_silence_seconds\) while it started"
    with pytest.raises(EngineDead, match=message):
        replicas(PeerCarrier(Life(-1, silent)), replica_silence_seconds=0.1).__enter__()


def test_a_rolling_restart_loses_nothing_and_leaves_no_gap() -> None:
    want = expected(3)
    with replicas(PeerCarrier(), 2) as engine:
        old, requests, others = keys(engine), draw_requests(engine, 3), list[Request]()
        for request in requests:
            engine.submit(request)
        engine.step()
        engine.restart()

        def is_new() -> bool:
            assert engine.supervisor.num_ready == 2, "all are there at any time"
            others.append(plain(engine))
            engine.submit(others[-1])
            return not set(old) & set(keys(engine))

        wait_for(engine, is_new)
        one = run(engine, [plain(engine)])
        assert answers(requests) == want
        assert all(answers([other]) == one for other in others)
        assert engine.supervisor.num_lost == 0
        wait_for(engine, lambda: not engine.supervisor._leaving)


def test_a_rolling_restart_goes_on_behind_a_start_that_hangs_and_says_when_it_cannot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = PeerCarrier(Life(), Life(), Life(), Life(-1, silent), Life(-2, dead))
    with replicas(own, 3, replica_start_attempts=3, replica_silence_seconds=0.1) as engine:
        first = keys(engine)
        engine.restart()
        wait_for(engine, lambda: not set(first) & set(keys(engine)))
        assert (own.num_starts, engine.supervisor.num_ready) == (8, 3)
        second = keys(engine)
        own.lives = [Life(), *(Life(-1, dead) for _ in range(3))]
        engine.restart()
        wait_for(engine, lambda: "the restart of replicas ends here" in caplog.text)
        assert "[2] were not started anew" in caplog.text
        assert [old == new for old, new in zip(second, keys(engine), strict=True)] == [False, True, True]
        assert run(engine, [plain(engine)])[0][3] == "length"


def test_requests_end_with_what_is_waited_for_and_come_again() -> None:
    """The only node of a cluster is gone: no start fails, and none succeeds."""

    class WithoutNode(PeerCarrier):
        def start(self, number: int) -> Peer:
            if self.num_starts == 1:
                self.waits[number] = "a node"
                while self.waits:
                    time.sleep(0.01)
            return super().start(number)

    own = WithoutNode(Life(2, dead))
    with replicas(own, replica_wait_seconds=0.3, replica_silence_seconds=0.1) as engine:
        request = plain(engine)
        run(engine, [request])
        reason = "no replica has come within replica_wait_seconds=0.3; replica 0 waits for a node; the last error was: "
        assert str(request.error) == reason + "replica 0 was killed by SIGKILL"
        assert engine.unavailable == str(request.error)
        serving = SimpleNamespace(
            engine=SimpleNamespace(engine=engine, error=None, seconds_in_step=0.0), config=ServerConfig()
        )
        assert ServedModel.closed_because.fget(serving) == engine.unavailable, "what /health says"  # type: ignore[attr-defined]
        late = plain(engine)
        run(engine, [late])
        assert str(late.error) == engine.unavailable
        own.waits.clear()
        wait_for(engine, lambda: engine.unavailable is None)
        assert run(engine, [plain(engine)])[0][3] == "length"


def test_requests_end_where_replicas_are_ready_and_die_and_come_again() -> None:
    def is_ready_and_dies(own: Connection) -> None:
        own.send(READY)

    own: Any = PeerCarrier()
    own.lives = [is_ready_and_dies] * 6
    with replicas(own) as engine:
        wait_for(engine, lambda: engine.unavailable is not None)
        assert str(engine.unavailable).startswith(
            "no replica lives long enough to compute anything; the last error was: rep"
        )
        wait_for(engine, lambda: engine.unavailable is None and engine.supervisor.num_lost == 6)
        assert run(engine, [plain(engine)])[0][3] == "length"


def kill_all(engine: ReplicatedEngine) -> None:
    for process in engine.supervisor.current:
        process.started.kill()


def test_a_replica_that_cannot_be_started_is_an_error_at_first_and_tried_again_later() -> None:
    with pytest.raises(RuntimeError, match="no room for it"):
        replicas(PeerCarrier(failing={1}), 2).__enter__()
    own = PeerCarrier(failing={1, 2, 3})
    with replicas(own) as engine:
        want = run(engine, [plain(engine)])
        kill_all(engine)
        assert run(engine, [plain(engine)]) == want
        assert own.num_starts == 5


def test_a_replica_that_cannot_be_started_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a restart: from then on, requests wait for the replicas that are started."""
    monkeypatch.setattr(supervisor, "PING_SECONDS", 0.01)  # by then, it is looked whether a replica is to come
    own = PeerCarrier(failing=range(2, 100))
    with replicas(own, 2, replica_start_attempts=3) as engine:
        kill_all(engine)
        wait_for(engine, lambda: own.num_starts == 8)
        for _ in range(2):  # who waits, and who comes later
            request = plain(engine)
            run(engine, [request])
            assert isinstance(request.error, EngineDead)
        limit = "could not be started replica_start_attempts=3 times; the last error was: no room for it"
        assert limit in str(request.error)
        end = time.monotonic() + 0.2
        wait_for(engine, lambda: time.monotonic() > end)
        assert own.num_starts == 8
        own.failing = ()
        engine.restart()
        assert run(engine, [plain(engine)])[0][3] == "length"
        wait_for(engine, lambda: engine.supervisor.num_ready == 2)


def test_a_restart_that_is_given_up_does_not_give_up_who_runs() -> None:
    own = PeerCarrier(failing={1, 2, 3})
    with replicas(own, replica_start_attempts=3) as engine:
        want = run(engine, [plain(engine)])
        engine.restart()
        wait_for(engine, lambda: own.num_starts == 4 and not engine.supervisor.slots[0].is_starting)
        assert run(engine, [plain(engine)]) == want
        kill_all(engine)
        assert run(engine, [plain(engine)]) == want
        assert (own.num_starts, engine.supervisor.num_lost) == (5, 1)
