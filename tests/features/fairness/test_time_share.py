"""Clients share time: beside N - 1 others a client waits at most N times as long as alone, and all get the same tokens.

Time is what steps are predicted to take: no test waits for a clock.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.messages import StepPlan
from nanoengine.core.scheduler import Step
from nanoengine.core.sequence import Request, Sequence
from nanoengine.features.fairness.time_share import LONGEST, RECENT_SECONDS
from nanoengine.features.speculation.drafter import Candidate, Drafter
from tests.core.lives import check_lives
from tests.core.toys import ToyModel, check, make_engine, run
from tests.features.fairness.sharing import POLICIES, Recorder, rows_of_clients, shared_engine, submit
from tests.features.speculation.toys import Drafted

ROOM = {"num_blocks": 4_000, "max_model_len": 520, "max_num_seqs": 64, "max_num_batched_tokens": 64}
"""Blocks and rows for all: time alone is short."""


def time_alone(length: int, max_tokens: int, n: int, **options: Any) -> float:
    recorder = Recorder()
    engine = make_engine(parts=[recorder], **ROOM, **options)
    submit(engine, length, "alone", max_tokens, n=n)
    run(engine, [])
    return recorder.now


@pytest.mark.parametrize("seed", range(20))
def test_nobody_waits_longer_than_the_time_of_all(seed: int) -> None:
    """Drawn loads of two to six clients. From its arrival to its end, a request of a client that has no other takes N times as
    long as alone, and one step more for each that was in flight and each other client that came meanwhile."""
    rng = random.Random(seed)
    depth, num_clients = rng.choice([1, 2]), rng.randint(2, 6)
    options: dict[str, Any] = {"policy": "mixed", "depth": depth}
    recorder = Recorder()
    engine, time = shared_engine(**ROOM, **options, parts=[recorder])
    waiting: list[tuple[int, int, tuple[int, int, int]]] = []
    for client in range(num_clients):
        at = rng.randint(0, 20)
        for _ in range(rng.randint(1, 4)):
            wish = rng.choice([(5, 9, 1), (100, 3, 1), (20, 15, 15), (450, 2, 1), (40, 20, 4)])
            waiting.append((at, client, wish))
            at += rng.randint(0, 60)
    waiting.sort()
    running: dict[Request, tuple[float, tuple[int, int, int], int]] = {}
    of_client = defaultdict[int, list[Request]](list)
    arrivals: list[float] = []
    now = 0
    alone = {wish: time_alone(*wish, **options) for _, _, wish in waiting}
    while waiting or engine.has_unfinished:
        while waiting and waiting[0][0] <= now:
            _, client, wish = waiting.pop(0)
            unfinished = [own for own in of_client[client] if not own.finished]
            if not unfinished:
                arrivals.append(recorder.now)
            request = submit(engine, wish[0] + client, f"{client}", wish[1], n=wish[2])
            of_client[client].append(request)
            if not unfinished:
                running[request] = recorder.now, wish, client
        engine.step()
        check(engine.scheduler)
        now += 1
        for request in [own for own in running if own.finished]:
            start, wish, client = running.pop(request)
            if sum(own.finished for own in of_client[client]) == len(of_client[client]) == 1:
                pieces = depth + sum(at >= start for at in arrivals)
                bound = num_clients * alone[wish] + pieces * recorder.longest
                assert recorder.now - start <= bound, (wish, client)
    assert not time.num_unfinished


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", POLICIES)
def test_who_waits_for_blocks_is_looked_at_when_there_may_be_some(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool for a part of them, most steps look up no prompt; but who comes is looked up in the next step."""

    def num_looked_up() -> int:
        rng, found = random.Random(seed), list[Sequence]()
        engine, _ = shared_engine(num_blocks=rng.randint(100, 150), max_model_len=200, policy=policy)
        blocks, find = engine.scheduler.blocks, engine.scheduler.blocks.find
        monkeypatch.setattr(blocks, "find", lambda seq: found.append(seq) or find(seq))  # type: ignore[func-returns-value]
        for number in range(12):
            submit(engine, 30 + rng.randrange(60), f"{number % 3}", 60)
        for _ in range(rng.randrange(20, 40)):
            engine.step()
        newcomer = submit(engine, 5, "newcomer")
        engine.step()
        assert newcomer.sequences[0] in found
        run(engine, [])
        return len(found)

    now = num_looked_up()
    monkeypatch.setattr("nanoengine.features.fairness.time_share.MOST_ALIKE", 0)
    assert now < 0.6 * num_looked_up()


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_clients_are_all_in_every_step(policy: str) -> None:
    """Many small clients share the reading of the weights."""
    recorder = Recorder()
    engine, _ = shared_engine(**ROOM, policy=policy, parts=[recorder])
    for number in range(32):
        submit(engine, 3, f"{number}", 20)
    while not all(seq.output_token_ids for seq in engine.scheduler.running) or not engine.scheduler.running:
        engine.step()
    recorder.steps.clear()
    run(engine, [])
    assert {len(step.decodes) for step in recorder.steps[:15]} == {32}


@pytest.mark.parametrize("policy", POLICIES)
def test_clients_with_much_work_have_equal_time(policy: str) -> None:
    """However different their work is. Who is in a step of another may add as much as that has, and both pay half of what a step
    takes without rows: so it gets a little more."""
    recorder = Recorder()
    engine, time = shared_engine(**ROOM, policy=policy, parts=[recorder])
    submit(engine, 8, "rows", 60, n=40)
    submit(engine, 500, "prompt", 2)
    submit(engine, 501, "prompt", 2)
    while len(time.num_unfinished) == 2:
        engine.step()
        check(engine.scheduler)
        time.accounts.charge_due()
        served = [time.clocks[client] for client in ("rows", "prompt")]
        assert min(served) >= 0.45 * sum(served) - recorder.longest
    run(engine, [])


@pytest.mark.parametrize("length", [500, 5000])
def test_a_step_beside_others_is_not_as_long_as_prompts_are(length: int) -> None:
    """Who comes while it is made waits for it. Alone, all of a prompt is in as few steps as may be."""
    recorder = Recorder()
    room = ROOM | {"num_blocks": 40_000, "max_model_len": 8000, "max_num_batched_tokens": 4000}
    engine, time = shared_engine(**room, policy="mixed", parts=[recorder])
    heavy = [submit(engine, length + number, "heavy", 2) for number in range(20)]
    engine.step()
    assert sum(run.num_new for run in recorder.steps[-1].plan.runs) == 4000
    light = submit(engine, 5, "light", 60)
    before = recorder.longest
    recorder.longest = 0.0
    while not light.finished:
        engine.step()
    assert 0 < recorder.longest <= 2 * LONGEST * time.cost.prompts.at(1) < before
    assert any(seq.num_computed for request in heavy for seq in request.sequences)
    for request in heavy:
        engine.abort(request.request_id)


def test_a_client_that_comes_back_is_not_served_twice() -> None:
    """Its clock stands where it was, if the others are behind it: many short requests are one long one."""
    engine, time = shared_engine(**ROOM, policy="mixed")
    submit(engine, 500, "long", 2)
    submit(engine, 8, "rows", 3, n=10)
    while "rows" in time.num_unfinished:
        engine.step()
    time.clocks["rows"] += 100
    submit(engine, 8, "rows", 3)
    assert time.clocks["rows"] > 100
    time.accounts.charge_due()
    before = time.clocks["long"]
    engine.step()
    submit(engine, 8, "new", 3)
    assert time.clocks["new"] == before, "of who the last step was made for, before it was charged"
    run(engine, [])


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("priority", [0, -(2**63)])
def test_who_took_every_row_gives_a_newcomer_its_part(depth: int, priority: int) -> None:
    engine, _ = shared_engine(num_blocks=900, max_num_seqs=32, policy="mixed", depth=depth)
    flood = [submit(engine, 5, "flood", 50, n=16, priority=priority) for _ in range(2)]
    for _ in range(3):
        engine.step()
    assert rows_of_clients(engine) == {"flood": 32}
    newcomer = submit(engine, 9, "newcomer", 30, n=20)
    for _ in range(2 * depth + 2):
        engine.step()
        check(engine.scheduler)
    assert newcomer.sequences[0].output_token_ids
    for _ in range(16):
        engine.step()
        check(engine.scheduler)
    assert rows_of_clients(engine) == {"flood": 16, "newcomer": 16}
    run(engine, [])
    lengths = [len(seq.output_token_ids) for request in (*flood, newcomer) for seq in request.sequences]
    assert lengths == [50] * 32 + [30] * 20


def test_a_client_that_is_alone_has_every_step_and_pays_nothing() -> None:
    """What shares out the steps is asked only while there are two."""
    engine, time = shared_engine()
    mine = [submit(engine, 5, "a", 2, n=2)]
    assert time.is_idle
    others = [submit(engine, 5, client, 9) for client in ("b", "c")]
    assert (time.is_idle, time.num_unfinished) == (False, {"a": 2, "b": 1, "c": 1})
    engine.abort(others[0].request_id)
    assert (time.is_idle, time.num_unfinished) == (False, {"a": 2, "c": 1})
    engine.abort(others[1].request_id)
    assert (time.is_idle, time.num_unfinished) == (True, {"a": 2})
    run(engine, [])
    assert (time.is_idle, time.num_unfinished, mine[0].finished) == (True, {}, True)


def test_steps_stay_short_for_a_moment_after_others_have_gone() -> None:
    """Who chats comes again, and waits for the step that runs then."""
    now, recorder = 0.0, Recorder()
    room = ROOM | {"num_blocks": 40_000, "max_model_len": 8000, "max_num_batched_tokens": 4000}
    engine, time = shared_engine(**room, policy="mixed", parts=[recorder])
    time.accounts.clock = lambda: now
    for number in range(8):
        submit(engine, 3000 + number, "heavy", 2)
    light = submit(engine, 5, "light", 1)
    while not light.finished:
        engine.step()
    engine.step()
    now += RECENT_SECONDS + 0.1
    for _ in range(2):  # the step that finds out is as short as those before
        assert sum(run.num_new for run in recorder.steps[-1].plan.runs) < 1000
        engine.step()
    assert time.is_idle
    engine.step()
    assert sum(run.num_new for run in recorder.steps[-1].plan.runs) >= 3999
    for request in list(engine.requests):
        engine.abort(request)


@pytest.mark.parametrize("num_drafts", [1, 15])
def test_drafts_of_others_do_not_make_a_step_longer(num_drafts: int) -> None:
    class Guesses(Drafter):
        def postpone(self, candidates: Iterable[Candidate], num_decodes: int, budget: int) -> Iterable[Sequence]:
            return ()

        def choose(
            self, candidates: Iterable[Candidate], num_decodes: int, num_tokens: int, budget: int
        ) -> dict[Sequence, list[int]]:
            counts = [max(0, min(num_drafts, budget - num_drafts * number)) for number in range(num_decodes)]
            heavy = [own.seq for own in candidates if own.seq.request.client == "heavy"]
            return {seq: [3] * count for seq, count in zip(heavy, counts, strict=False) if count}

    recorder = Recorder()
    engine, _ = shared_engine(**ROOM, policy="mixed", parts=[Guesses(), recorder])
    alone = time_alone(12, 10, 1, policy="mixed")
    submit(engine, 8, "heavy", 400, n=20)
    for _ in range(5):
        engine.step()
    assert recorder.steps[-1].runs, "drafts are verified where nobody else is there"
    start, before = recorder.now, recorder.longest
    light = submit(engine, 12, "light", 10)
    while not light.finished:
        engine.step()
        check(engine.scheduler)
    assert recorder.now - start <= 2 * alone + before
    for request in list(engine.requests):
        engine.abort(request)


def test_a_step_to_learn_the_time_of_decodes_has_no_prompts_however_slow_they_were_measured() -> None:
    now, recorder = 0.0, Recorder()
    engine, time = shared_engine(**ROOM, policy="mixed", parts=[recorder])
    time.accounts.clock = lambda: now
    time.cost.is_measured = True
    time.cost.decodes.seconds = [100.0 * seconds for seconds in time.cost.decodes.seconds]
    for number in range(8):
        submit(engine, 500 + number, "heavy", 2)
    light = submit(engine, 5, "light", 20)
    while not light.finished:
        engine.step()
        now += 1.0
    assert any(step.decodes and not step.runs for step in recorder.steps)
    for request in list(engine.requests):
        engine.abort(request)


class Shared(Drafted):
    """Requests of three clients, who share blocks and time."""

    def engine(self, way: dict[str, Any], failing: list[int]) -> LLMEngine:
        self.preempted: dict[Sequence, int] = {}
        engine, self.time = shared_engine(model=ToyModel(4, failing), parts=self.parts(), **way)
        return engine

    def requests(self, engine: LLMEngine) -> list[Request]:
        rng, requests = random.Random(self.seed), super().requests(engine)
        for request in requests:
            request.client = rng.choice("aabc")
        return requests

    def after_step(self, engine: LLMEngine) -> None:
        super().after_step(engine)
        before, self.preempted = self.preempted, {seq: seq.num_preemptions for seq in engine.scheduler.running}
        again = [seq for seq, count in self.preempted.items() if count > before.get(seq, count)]
        assert not again or engine.depth > 1, "who gives way does not start again in the same step"

    def after_round(self, engine: LLMEngine, requests: list[Request]) -> None:
        assert not self.time.num_unfinished


@pytest.mark.parametrize("seed", range(6))
def test_small_pools_few_rows_and_small_steps_end_too(seed: int) -> None:
    """Where blocks, rows and tokens of a step are all short, everybody gets all tokens, and the same as alone."""
    check_lives(Shared(seed), 30)


def test_waiting_sequences_are_looked_at_once_a_step_and_only_while_one_may_start() -> None:
    class Counted(list[Any]):
        num_looks = 0

        def __iter__(self) -> Any:
            for seq in super().__iter__():
                self.num_looks += 1
                yield seq

    engine, time = shared_engine(max_num_seqs=64, num_blocks=4000, policy="mixed")
    for _ in range(2000):
        submit(engine, 5, "crowd", 40)
    for _ in range(32):
        submit(engine, 6, "late", 40)
    looked = engine.scheduler.waiting = Counted(engine.scheduler.waiting)
    engine.step()
    assert looked.num_looks <= 3 * 2032, "for whom the step is, who is first, and who comes then"
    while rows_of_clients(engine)["late"] < 32:
        engine.step()
    looked.num_looks = 0
    engine.step()
    assert looked.num_looks == 0, "no row is free"
    assert time.num_unfinished == {"crowd": 2000, "late": 32}


def test_rows_that_had_no_place_come_first_in_the_next_step() -> None:
    """All rows of a client go on equally fast, though few have a place beside another."""
    engine, _ = shared_engine(**ROOM, policy="mixed")
    rows = submit(engine, 8, "rows", 200, n=40)
    while not all(seq.output_token_ids for seq in rows.sequences):
        engine.step()
    submit(engine, 3, "light", 200)
    before = [len(seq.output_token_ids) for seq in rows.sequences]
    for _ in range(60):
        engine.step()
    new = [len(seq.output_token_ids) - count for seq, count in zip(rows.sequences, before, strict=True)]
    assert len(engine.scheduler.running) == 41
    assert 10 < min(new) <= max(new) < 60
    assert max(new) - min(new) <= 2
    for client in ("rows", "light"):
        for request in [own for own in engine.requests.values() if own.client == client]:
            engine.abort(request.request_id)


def test_a_step_that_computes_nothing_is_charged_to_nobody() -> None:
    """Not even what the step before it took: it only carries out orders of stores."""
    engine, time = shared_engine(**ROOM, policy="mixed")
    for client in ("first", "second"):
        submit(engine, 50, client)
    engine.step()
    time.accounts.charge_due()
    before = dict(time.clocks)
    time.complete(Step(99, StepPlan()))
    time.accounts.charge_due()
    assert time.clocks == before
    run(engine, [])


def test_somebody_goes_on_though_there_is_time_for_no_token() -> None:
    """The client that a step is for may find no block, or wait for one that another computes."""
    engine, time = shared_engine(**ROOM, policy="mixed")
    first, second = submit(engine, 50, "first"), submit(engine, 60, "second")
    time.preemption_victims([], engine.scheduler.waiting)
    other = second if time._leader == "first" else first
    time._left = {other.client: 1e-9}
    [seq] = other.sequences
    assert time.allowed(seq, 64) == 1
    seq.num_computed = 1
    time.took(seq, 1)
    assert time.allowed(seq, 64) == 0
    seq.num_computed = 0
    run(engine, [])
