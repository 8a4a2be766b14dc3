"""What a request gets does not depend on what becomes of replicas: to the token, the text and the log probability."""

from __future__ import annotations

import random
from typing import Any

import pytest

from nanoengine.core.sequence import Request
from nanoengine.errors import EngineDead
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.scale.replicas.fleet import MOST_LOSSES
from nanoengine.scale.replicas.messages import Abort, CompletionDelta, ResetPrefixCache, StepUpdate, Submit
from tests.features.kv_offload.toys import Files

from .world import ToyMember, World, answers, draw_requests, expected

NUM_LIVES = 12


def draw_way(rng: random.Random) -> dict[str, Any]:
    return {
        "num_blocks": rng.choice([15, 16, 25, 400]),
        "depth": rng.choice([1, 2]),
        "max_num_batched_tokens": rng.choice([3, 7, 64, 8192]),
        "policy": rng.choice(["prefill_first", "mixed"]),
        "max_num_seqs": rng.choice([2, 3, 100]),
    }


@pytest.mark.parametrize("has_files", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_and_nothing_comes_twice_whatever_dies_when(seed: int, has_files: bool) -> None:
    """Kills, drains, aborts and messages that are late, at any moment; some replicas read and write files, which others delete or
    cannot read.
    """
    want = expected(seed)
    rng = random.Random(seed)
    seen = dict.fromkeys(("moved", "killed", "drained", "aborted", "unrouted"), 0)
    seen |= dict.fromkeys(("loaded", "deleted"), 0) if has_files else {}
    files: Files | None = {} if has_files else None

    def draw_member() -> dict[str, Any]:
        way = draw_way(rng)
        if has_files:
            way |= {"bad": rng.choice([0.0, 0.2]), "max_staged": rng.choice([1, 3, 40])}
        return way

    for _ in range(NUM_LIVES):
        world = World(rng, files)
        for _ in range(rng.randint(1, 3)):
            world.join(**draw_member())
        requests = draw_requests(world.front, seed)
        waiting, aborted = requests.copy(), set()
        for _ in range(rng.randint(20, 150)):
            act = rng.random()
            if waiting and act < 0.2:
                world.submit(waiting.pop(0))
            elif act < 0.23 and world.members:
                seen["killed"] += 1
                number = rng.choice(list(world.members))
                has_failed = world.kill(number)
                assert not has_failed, "requests that get on are tried again"
                seen["unrouted"] += bool(world.fleet.unrouted)
            elif act < 0.26 and world.members:
                seen["drained"] += 1
                world.drain(rng.choice(list(world.members)))
            elif act < 0.3:
                world.join(**draw_member())
            elif act < 0.31 and len(aborted) < 2:
                victim = rng.choice(requests)
                if victim in world.fleet.running:
                    seen["aborted"] += 1
                    aborted.add(victim)
                    world.abort(victim)
            elif files and act < 0.33:
                seen["deleted"] += 1
                del files[rng.choice(list(files))]
            elif world.members:
                member = rng.choice(list(world.members.values()))
                act = rng.random()
                if act < 0.3:
                    member.read()
                elif act < 0.65:
                    member.step()
                else:
                    world.deliver(member)
            for own in world.fleet.running.values():
                own.num_losses = 0  # by chance some would be lost again and again without a token
        for request in waiting:
            world.submit(request)
        world.join()
        world.run()
        got = answers(requests)
        which = [request for request in requests for _ in request.sequences]
        for request, wanted, found in zip(which, want, got, strict=True):
            if request in aborted:
                tokens, text, logprobs = found[:3]
                assert wanted[0][: len(tokens)] == tokens
                assert wanted[1].startswith(text)
                assert wanted[2][: len(tokens)] == logprobs
            else:
                assert found == wanted
        seen["moved"] += world.fleet.num_moves
        if has_files:
            seen["loaded"] += sum(member.offload.stats.num_loaded_files for member in world.members.values())
        assert world.num_begun == sum(len(request.sequences) for request in requests)
        assert_idle(world)
    assert all(seen.values()), f"the rare paths were met: {seen}"


def assert_idle(world: World) -> None:
    """Nothing is left: no request here or there, nothing reserved, no block in use."""
    for member in world.members.values():
        while member.inbox:
            member.read()
        for _ in range(60):
            member.step()
        assert not member.replica.requests
        blocks = member.replica.engine.scheduler.blocks
        assert blocks.num_free == blocks.num_blocks
        while member.outbox:
            world.deliver(member)
        replica = world.fleet.replicas[member.number]
        assert replica.load == 0
        assert not replica.requests
        assert replica.cached == set(blocks.index[0]), "the router knows what is cached"


def test_tokens_that_are_left_out_or_come_twice_are_an_error() -> None:
    """The replica that says so is lost by it (test_peers.py)."""
    for first_token in (1, -1):
        world = World(random.Random(0))
        request = world.front.make_request([1, 2, 3], SamplingParams(max_tokens=9, seed=0))
        member = world.join()
        world.submit(request)
        key = world.fleet.running[request].key
        world.fleet.receive(member.number, StepUpdate([CompletionDelta(key, 0, 0, [5], "a", None, 0, None)]))
        with pytest.raises(ValueError, match="are not the next of this completion"):
            world.fleet.receive(
                member.number, StepUpdate([CompletionDelta(key, 0, 1 + first_token, [5], "a", None, 0, None)])
            )
        assert request.sequences[0].output_token_ids == [5]


def test_a_replica_that_has_forgotten_its_cache_is_known_to_have_nothing() -> None:
    world = World(random.Random(0))
    member = world.join()
    for request in draw_requests(world.front, 1):
        world.submit(request)
    world.run()
    replica = world.fleet.replicas[member.number]
    assert replica.cached
    member.send(ResetPrefixCache())
    member.read()
    member.step()
    world.deliver(member)
    assert not replica.cached


def test_a_prompt_goes_where_it_is_cached() -> None:
    world = World(random.Random(0))
    first, second = world.join(), world.join()
    prompt = list(range(1, 25))
    for tokens, replica in (
        (prompt, first),
        ([40, 41, 42, 43, 44], second),
        ([*prompt, 30], first),
        ([*prompt, 31], first),
    ):
        request = world.front.make_request(tokens, SamplingParams(max_tokens=1, seed=0))
        world.submit(request)
        route = world.fleet.running[request].route
        assert route is not None
        assert route.replica.number == replica.number
        world.run()


def until_tokens(world: World, member: ToyMember, request: Request, count: int) -> None:
    while len(request.sequences[0].output_token_ids) < count:
        member.read()
        member.step()
        world.deliver(member)


def test_a_request_that_kills_replicas_is_ended_and_others_go_on() -> None:
    world = World(random.Random(0))
    poison, other = (world.front.make_request([1, 2, token], SamplingParams(max_tokens=9, seed=0)) for token in (3, 4))
    for number in range(MOST_LOSSES):
        member = world.join()
        if not number:
            world.submit(poison)
        assert any(isinstance(message, Submit) for message in member.inbox)
        ended = world.kill(member.number)
    assert ended == [poison]
    assert isinstance(poison.error, EngineDead)
    assert poison.finished
    world.submit(other)
    for number in range(MOST_LOSSES):
        member = world.join()
        until_tokens(world, member, other, number + 1)
        assert not world.kill(member.number), "a request that gets on is tried again"
    world.join()
    world.run()
    assert other.finished
    assert other.error is None


def test_requests_without_a_replica_wait_for_one_or_are_told_that_none_comes() -> None:
    world = World(random.Random(0))
    requests = draw_requests(world.front, 3, 2)
    world.submit(requests[0])
    assert world.fleet.unrouted
    assert world.fleet.fail(EngineDead("none lives")) == [requests[0]]
    assert isinstance(requests[0].error, EngineDead)
    assert {seq.finish_reason for seq in requests[0].sequences} == {"error"}
    world.submit(requests[1])
    world.join()
    world.run()
    assert answers([requests[1]]) == expected(3, 2)[len(requests[0].sequences) :]


def test_news_of_those_who_are_gone_are_dropped() -> None:
    world = World(random.Random(0))
    member = world.join()
    world.kill(member.number)
    assert world.fleet.receive(member.number, StepUpdate()) == []


def test_what_moves_goes_on_where_it_was_and_what_has_ended_is_not_computed_again() -> None:
    world = World(random.Random(0))
    first, second = world.join(), world.join()
    request = world.front.make_request([1, 2, 3], SamplingParams(n=3, max_tokens=12, seed=4, stop=["k", "m", "a"]))
    world.submit(request)
    while {seq.finished for seq in request.sequences} != {True, False} or first.inbox:
        first.read()
        first.step()
        world.deliver(first)
        assert not request.finished, "another seed has completions that end one after the other"
    world.drain(first.number)
    assert isinstance(first.inbox.pop(), Abort), "it computes it no more"
    [submitted] = [message.resumable for message in second.inbox]
    going_on = [seq for seq in request.sequences if not seq.finished]
    assert submitted.completions == {seq.index: seq.output_token_ids for seq in going_on}
    assert all(submitted.completions.values())
    world.run()
    assert second.replica.engine.requests == {}


def test_a_replica_may_refuse_what_moves_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> Request:
        raise LookupError("not here")

    world = World(random.Random(0))
    first, second = world.join(), world.join()
    request = world.front.make_request([1, 2, 3], SamplingParams(max_tokens=9, seed=0))
    world.submit(request)
    until_tokens(world, first, request, 2)
    monkeypatch.setattr(second.replica, "make_request", refuse)
    world.drain(first.number)
    world.run()
    assert "not here" in str(request.error)
    assert request.sequences[0].output_token_ids
