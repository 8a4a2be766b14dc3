"""Whatever a rank does in place of what it should, at whatever moment, its group is lost, and no request ends by it."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest

from nanoengine.core.config import EngineConfig
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.messages import StepPlan
from nanoengine.errors import EngineDead
from nanoengine.scale.worker import remote_runner
from nanoengine.scale.worker.member import ALIVE, RankLost
from nanoengine.scale.worker.remote_runner import RemoteRunner
from tests.core.toys import ToyModel, make_engine
from tests.scale.replicas.world import BLOCK_SIZE, answers, draw_requests, expected

from .peers import FAULTS, Peer, deaf, silent


def repeats(own: Connection, number: int) -> None:
    own.send((number - 1, True, None))
    silent(own)


def skips(own: Connection, number: int) -> None:
    own.send((number + 1, True, None))
    silent(own)


def fails_alone(own: Connection, number: int) -> None:
    own.send((number, False, MemoryError("no room")))
    silent(own)


def waits_in_vain(own: Connection, number: int) -> None:
    own.send((number, False, RankLost("rank 1 did not come")))
    silent(own)


ANSWERS = (repeats, skips, fails_alone, waits_in_vain)
AT_START, AT_FIRST_SIGN = -2, -1


class Rank:
    """What a rank without tensors does.

    Args:
        fault: what it does in place of what it should; None: nothing wrong.
        at: when: AT_START, AT_FIRST_SIGN, or the number of a plan, from 0.
    """

    def __init__(self, fault: Callable[..., None] | None = None, at: int = 0):
        self.fails = {} if fault is None else {at: fault}

    def __call__(self, own: Connection) -> None:
        if AT_START in self.fails:
            return self.fails[AT_START](own)
        _, member, _ = own.recv()
        own.send(ALIVE)
        if AT_FIRST_SIGN in self.fails:
            return self.fails[AT_FIRST_SIGN](own)
        own.send((0, True, None))
        model = ToyModel(BLOCK_SIZE)
        for count in itertools.count():
            if (message := own.recv()) is None:
                break
            number, plan = message
            if (fault := self.fails.get(count)) is not None:
                return fault(own, number) if fault in ANSWERS else fault(own)
            result = model.launch(plan)()
            own.send((number, True, result if member.rank == 0 else None))
        return None


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RemoteRunner]:
    """Starts a group of such ranks."""
    monkeypatch.setattr(remote_runner, "MORE_SECONDS", 0.2)
    monkeypatch.setattr(remote_runner, "START_SILENCE_SECONDS", 0.1)

    def started(*ranks: Rank) -> RemoteRunner:
        left = list(ranks)

        def start_child(*_: Any) -> tuple[Peer, socket.socket]:
            peer = Peer(left.pop(0))
            return peer, peer.socket

        monkeypatch.setattr(remote_runner, "start_child", start_child)
        return RemoteRunner(cast(EngineConfig, None), len(ranks), 0.1)

    return started


def run_all(engine: LLMEngine) -> None:
    while engine.has_unfinished:
        engine.step()


@pytest.mark.parametrize("fault", [*FAULTS, repeats, skips, waits_in_vain])
def test_a_fault_of_any_rank_at_any_plan_loses_the_group_and_ends_no_request(
    start: Callable[..., RemoteRunner], fault: Callable[..., None]
) -> None:
    rng = random.Random(FAULTS.index(fault) if fault in FAULTS else fault.__name__)
    size, depth = rng.choice([1, 2, 3]), rng.choice([1, 2])
    ranks = [Rank() for _ in range(size)]
    ranks[rng.randrange(size)] = Rank(fault, rng.randint(0, 5))
    engine = make_engine(model=cast(ToyModel, start(*ranks)), depth=depth, max_num_seqs=4)
    requests = draw_requests(engine, 3, 12)
    for request in requests:
        engine.submit(request)
    with pytest.raises(EngineDead):
        run_all(engine)
    assert not any(request.error for request in requests)
    for (tokens, text, *_), (all_tokens, all_text, *_) in zip(answers(requests), expected(3, 12), strict=True):
        assert tokens == all_tokens[: len(tokens)]
        assert all_text.startswith(text)
    with pytest.raises(EngineDead, match="are gone"):
        engine.step()
    engine.close()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at", [AT_START, AT_FIRST_SIGN])
def test_a_start_with_a_fault_is_an_error(
    start: Callable[..., RemoteRunner], fault: Callable[..., None], at: int
) -> None:
    with pytest.raises(EngineDead, match="the worker process of rank 1 "):
        start(Rank(), Rank(fault, at))


def test_groups_without_faults_compute_the_same(start: Callable[..., RemoteRunner]) -> None:
    """Answers that nobody waits for, as after Ctrl-C, are dropped."""
    runner = start(Rank(), Rank())
    engine = make_engine(model=cast(ToyModel, runner), depth=2, max_num_seqs=4)
    for _ in range(3):
        runner.launch(StepPlan())
    requests = draw_requests(engine, 4, 12)
    for request in requests:
        engine.submit(request)
    run_all(engine)
    assert [seq[:2] + seq[3:] for seq in answers(requests)] == [seq[:2] + seq[3:] for seq in expected(4, 12)]
    engine.close()


def test_why_a_group_was_lost_is_told(start: Callable[..., RemoteRunner]) -> None:
    for ranks, message in (
        ((Rank(), Rank(silent)), r"of rank 1 took more than worker_step_seconds=0\.1"),
        ((Rank(silent), Rank(silent)), r"of rank 0, 1 took more than worker_step_seconds=0\.1"),
        ((Rank(silent), Rank(fails_alone)), r"failed in rank 1 alone \(MemoryError: no room\)"),
        ((Rank(silent), Rank(waits_in_vain)), "rank 1 did not come"),
        ((Rank(silent), Rank(skips)), r"rank 1 has said \(2, True, None\) where an answer to plan 1 was due"),
    ):
        with pytest.raises(EngineDead, match=message):
            start(*ranks).launch(StepPlan())()
    both = start(Rank(fails_alone), Rank(fails_alone))
    with pytest.raises(MemoryError, match="no room"):
        both.launch(StepPlan())()
    both.close()


def test_a_plan_that_a_stopped_rank_does_not_read_has_an_end(start: Callable[..., RemoteRunner]) -> None:
    """It is larger than what the socket takes."""
    plan = StepPlan()
    plan.extras["large"] = bytes(8 << 20)
    with pytest.raises(EngineDead, match=r"took more than worker_step_seconds=0\.1 for a step"):
        start(Rank(deaf)).launch(plan)()
    runner = start(Rank())
    assert runner.launch(plan)().token_ids == [], "one who reads it gets all of it"
    runner.close()
