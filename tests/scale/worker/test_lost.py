"""Whatever a worker does in place of what it should, at whatever moment: the requests go on in another one."""

from __future__ import annotations

import itertools
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest

from nanoengine.core.config import EngineConfig
from nanoengine.core.messages import StepPlan
from nanoengine.errors import EngineDead
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.scale.worker import remote_runner
from nanoengine.scale.worker.capability import resume_if_lost
from nanoengine.scale.worker.child import ending_of
from nanoengine.scale.worker.member import ALIVE
from nanoengine.scale.worker.options import WorkerOptions
from nanoengine.scale.worker.remote_runner import MOST_LOSSES, RemoteRunner, WorkerLost
from tests.core.toys import ToyModel, make_engine, run
from tests.scale.replicas.world import BLOCK_SIZE, answers, draw_requests, expected

from .peers import FAULTS, Peer, dead, deaf, silent, unexpected

PARAMS = SamplingParams(seed=1, max_tokens=8, ignore_eos=True)
LIMITS = WorkerOptions(worker_step_seconds=0.1, worker_silence_seconds=0.1, worker_start_attempts=4)


def repeats(own: Connection, number: int) -> None:
    own.send((number - 1, True, None))
    silent(own)


def skips(own: Connection, number: int) -> None:
    own.send((number + 1, True, None))
    silent(own)


class Life:
    """What a worker without tensors does.

    Args:
        at: when its fault comes: -2 at the beginning, -1 behind its first sign of life, then by the number of its plans.
        rank: whose it is.
    """

    def __init__(self, at: int = 0, fault: Callable[..., None] | None = None, rank: int = 0):
        self.at, self.fault, self.rank = at, fault, rank

    def __call__(self, own: Connection, rank: int) -> None:
        fails = {self.at: self.fault} if self.fault is not None and self.rank == rank else {}
        if -2 in fails:
            return fails[-2](own)
        _, member, _ = own.recv()
        assert member.rank == rank
        own.send(ALIVE)
        if -1 in fails:
            return fails[-1](own)
        own.send((0, True, None))
        model = ToyModel(BLOCK_SIZE)
        for count in itertools.count():
            if (message := own.recv()) is None:
                break
            number, plan = message
            if count in fails:
                return fails[count](own, number) if self.fault in (repeats, skips) else fails[count](own)
            result = model.launch(plan)()
            own.send((number, True, result if rank == 0 else None))
        return None


def runner_of(monkeypatch: pytest.MonkeyPatch, lives: Sequence[Life], size: int = 1) -> RemoteRunner:
    """One whose groups live so, one after the other, and without faults behind that."""
    calls = itertools.count()

    def start_child(*_: Any) -> tuple[Peer, socket.socket]:
        group, rank = divmod(next(calls), size)
        life = lives[group] if group < len(lives) else Life()
        peer = Peer(lambda own: life(own, rank))
        return peer, peer.socket

    monkeypatch.setattr(remote_runner, "start_child", start_child)
    monkeypatch.setattr(remote_runner, "RETRY_SECONDS", (0.0,))
    monkeypatch.setattr(remote_runner, "MORE_SECONDS", 0.0)
    return RemoteRunner(cast(EngineConfig, None), size, LIMITS)


@pytest.mark.parametrize("seed", range(6))
def test_drawn_lives_of_workers_change_no_token(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of all kinds while they start and at every plan; with one step in flight and with two."""
    rng = random.Random(seed)
    size, depth = rng.choice([1, 1, 2, 3]), rng.choice([1, 2])
    lives = [Life(rng.randint(1, 3), dead)]
    while len(lives) < 12:
        # Fewer starts that fail than are tried, and fewer losses at one step than make it guilty.
        is_start = rng.random() < 0.5 and any(life.at > 0 for life in lives[-3:])
        fault: Any = rng.choice(FAULTS if is_start else (*FAULTS, repeats, skips))
        lives.append(
            Life(rng.randint(-2, -1) if is_start else rng.randint(depth, depth + 3), fault, rng.randrange(size))
        )
    runner = runner_of(monkeypatch, lives, size)
    engine = make_engine(model=cast(ToyModel, runner), depth=depth, max_num_seqs=4)
    resume_if_lost(engine, runner)
    requests = draw_requests(engine, seed, 12)
    for request in requests:
        engine.submit(request)
    for _ in range(5000):
        if not engine.has_unfinished:
            break
        engine.step()
    assert [seq[:2] + seq[3:] for seq in answers(requests)] == [seq[:2] + seq[3:] for seq in expected(seed, 12)]
    assert runner.num_starts == 13
    engine.close()


def test_starts_are_tried_so_often_and_the_engine_can_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = [Life(1, dead), *(Life(-1, fault) for fault in (dead, silent, unexpected, dead))]
    runner = runner_of(monkeypatch, lives)
    engine = make_engine(model=cast(ToyModel, runner))
    resume_if_lost(engine, runner)
    requests = [own.make_request([3, 1, 4], PARAMS) for own in (engine, make_engine())]
    engine.submit(requests[0])
    engine.step()
    why = r"worker_start_attempts=4 times; .*: the worker process was killed by SIGKILL while it started"
    with pytest.raises(EngineDead, match=why):
        engine.step()
    assert runner.num_starts == 5
    while engine.has_unfinished:
        engine.step()
    assert runner.num_starts == 6
    run(make_engine(), requests[1:])
    assert requests[0].sequences[0].token_ids == requests[1].sequences[0].token_ids
    engine.close()


def test_a_plan_that_a_stopped_worker_does_not_read_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is larger than what the socket takes."""
    runner, plan = runner_of(monkeypatch, [Life(0, deaf)]), StepPlan()
    plan.extras["large"] = bytes(8 << 20)
    with pytest.raises(WorkerLost, match=r"took more than worker_step_seconds=0\.1 for a step"):
        runner.launch(plan)()
    runner.restart()
    assert runner.launch(plan)().token_ids == [], "one who reads it gets all of it"
    runner.close()


def test_steps_of_a_group_that_is_gone_are_not_taken_for_those_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(monkeypatch, [Life(0, dead)] * MOST_LOSSES)
    old = None
    for _ in range(MOST_LOSSES - 1):
        old = runner.launch(StepPlan())
        with pytest.raises(WorkerLost, match="was killed by SIGKILL"):
            old()
        runner.restart()
    with pytest.raises(EngineDead, match="3 were lost at the same step"):
        runner.launch(StepPlan())()
    runner.restart()
    assert old is not None
    with pytest.raises(EngineDead, match="that had this plan is gone"):
        old()
    assert runner.launch(StepPlan())().token_ids == []
    runner.close()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise SystemExit(7)", "has ended with exit code 7"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 35)", "was killed by signal 35"),
        ("import time; print(flush=True); time.sleep(60)", "has closed its socket"),
    ],
)
def test_how_a_process_ended_is_told(script: str, message: str) -> None:
    with subprocess.Popen([sys.executable, "-S", "-E", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        assert ending_of(process) == message
        process.kill()
