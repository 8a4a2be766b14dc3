"""How many replicas there are follows from the tokens that wait."""

from __future__ import annotations

import random
import time

import pytest

from nanoengine.core.errors import InvalidConfig
from nanoengine.core.sequence import Request
from nanoengine.replicas import scaling, supervisor
from nanoengine.replicas.options import ReplicaOptions
from nanoengine.replicas.scaling import DOWN_SECONDS, UP_SECONDS, Scaling
from nanoengine.sampling.params import SamplingParams

from .test_processes import PATIENCE, plain, replicas, run, wait_for
from .world import World, answers, draw_requests, expected


def changes(own: Scaling, count: int, *told: tuple[float, int, int]) -> list[int]:
    return [own.change(now, count, waiting, reserved) for now, waiting, reserved in told]


def test_one_is_added_when_too_many_tokens_wait_for_long_enough() -> None:
    late = UP_SECONDS + 0.1
    assert changes(Scaling(1, 3, 100), 2, (0.0, 201, 300), (late, 201, 300)) == [0, 1]
    assert changes(Scaling(1, 3, 100), 2, (0.0, 200, 300), (late, 200, 300)) == [0, 0], "as many as may wait"
    assert changes(Scaling(1, 3, 100), 3, (0.0, 900, 900), (late, 900, 900)) == [0, 0], "there are as many as may be"
    gap = (1.0, 0, 300)
    assert changes(Scaling(1, 3, 100), 2, (0.0, 201, 300), gap, (2.0, 201, 300), (late, 201, 300)) == [0] * 4
    again = (late, 500, 500), (late + 1.0, 500, 500), (2 * late, 500, 500)
    assert changes(Scaling(1, 3, 100), 2, (0.0, 500, 500), *again) == [0, 1, 0, 1], "each takes as long"


def test_one_is_taken_away_when_fewer_would_do_for_long_enough() -> None:
    late = DOWN_SECONDS + 0.1
    assert changes(Scaling(1, 3, 100), 3, (0.0, 0, 100), (late, 0, 100)) == [0, -1]
    assert changes(Scaling(1, 3, 100), 3, (0.0, 0, 101), (late, 0, 101)) == [0, 0]
    assert changes(Scaling(3, 3, 100), 3, (0.0, 0, 0), (late, 0, 0)) == [0, 0], "there are as few as may be"


def test_a_load_that_stays_does_not_make_them_come_and_go() -> None:
    rng = random.Random(3)
    for _ in range(50):
        least = rng.randint(1, 3)
        own, count, load = Scaling(least, least + 5, 100), least, rng.randint(0, 1500)
        seen = []
        for second in range(1000):
            change = own.change(float(second), count, load, load)
            count += change
            seen += [change] if change else []
        assert len(set(seen)) <= 1, "in one direction only"
        assert load <= 100 * count or count == least + 5


def test_the_tokens_that_wait_are_those_of_prompts_that_nobody_has_computed() -> None:
    world = World(random.Random(1))
    requests = [world.front.make_request([1] * 11, SamplingParams(n=2, max_tokens=3)) for _ in range(2)]
    world.submit(requests[0])
    assert world.fleet.num_tokens() == (17, 17), "it waits for a replica"
    member = world.join()
    world.submit(requests[1])
    assert world.fleet.num_tokens() == (34, 34)
    while not requests[0].sequences[0].output_token_ids:
        member.read()
        member.step()
        world.deliver(member)
    waiting, reserved = world.fleet.num_tokens()
    assert waiting < reserved < 34
    world.run()
    assert world.fleet.num_tokens() == (0, 0)


def test_replicas_come_and_go_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "UP_SECONDS", 0.05)
    monkeypatch.setattr(scaling, "DOWN_SECONDS", 0.2)
    monkeypatch.setattr(supervisor, "PING_SECONDS", 0.05)
    want = expected(4)
    with replicas(1, max_replicas=3, waiting_tokens_per_replica=10) as engine:
        slots = engine.supervisor.slots
        alone = run(engine, [plain(engine)])
        requests: list[Request] = []
        end = time.monotonic() + PATIENCE
        while engine.supervisor.num_ready < 3:
            while len(engine.requests) < 100:
                requests += draw_requests(engine, 4)
                for request in requests[-10:]:
                    engine.submit(request)
            engine.step()
            assert time.monotonic() < end, "no replica is added"
        run(engine, [])
        assert answers(requests) == want * (len(requests) // 10)
        wait_for(engine, lambda: len(slots) == 1 and engine.supervisor.num_ready == 1)
        wait_for(engine, lambda: not engine.supervisor._leaving)
        assert engine.supervisor.num_lost == 0
        assert run(engine, [plain(engine)]) == alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 3, "max_replicas": 2}, "max_replicas is 2: it must be an integer from replicas, which is 3"),
        ({"max_replicas": 2}, "must be above 0"),
        ({"replicas": 1, "max_replicas": True}, "max_replicas is True"),
        ({"replicas": 1, "waiting_tokens_per_replica": 0}, "waiting_tokens_per_replica is 0"),
    ],
)
def test_bad_options_are_named(options: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        ReplicaOptions(**options)
