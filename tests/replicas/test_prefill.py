"""Prefill replicas compute prompts into files, from which others go on; whatever goes wrong, others compute them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from nanoengine.core.sequence import Request
from nanoengine.replicas.messages import Submit
from nanoengine.sampling.params import SamplingParams

from .world import BLOCK_SIZE, ToyMember, World, answers, submit

PROMPT = [9, 1, 4, 8, 2] * 5
FULL = 24 // BLOCK_SIZE
"""Its full blocks before its last token."""


def world(*, num_prefill: int = 1, num_decode: int = 1, **way: Any) -> tuple[World, list[ToyMember]]:
    own = World(random.Random(0), {})
    return own, [own.join(prefills=number < num_prefill, **way) for number in range(num_prefill + num_decode)]


def request_of(world: World, prompt: list[int] = PROMPT, **params: Any) -> Request:
    return world.front.make_request(
        prompt, SamplingParams(**{"n": 2, "seed": 3, "max_tokens": 9, "logprobs": 0} | params)
    )


def where(world: World, request: Request) -> int | None:
    member = world.fleet.running[request].member
    return None if member is None else member.number


def right(prompt: list[int] = PROMPT) -> list[Any]:
    own = World(random.Random(0))
    own.join()
    own.submit(request := request_of(own, prompt))
    own.run()
    return answers([request])


def go_on(world: World, member: ToyMember) -> None:
    member.read()
    member.step()
    world.deliver(member)


def while_at(world: World, request: Request, member: ToyMember) -> Iterator[None]:
    """Go on there until the request moves."""
    for _ in range(500):
        if where(world, request) != member.number:
            return
        go_on(world, member)
        yield
    raise AssertionError("the request stays there")


def num_loaded(member: ToyMember) -> int:
    return member.offload.stats.num_loaded_files


def test_a_prompt_is_computed_by_the_one_and_read_by_the_other() -> None:
    own, (prefill, decode) = world()
    own.submit(request := request_of(own))
    [submitted] = prefill.inbox
    assert submitted.writes
    assert submitted.resumable.prompt_token_ids == PROMPT[: FULL * BLOCK_SIZE]
    assert submitted.resumable.params.max_tokens == 1
    assert not decode.inbox
    for _ in while_at(own, request, prefill):
        assert not any(seq.output_token_ids for seq in request.sequences)
    [submitted] = decode.inbox
    assert own.files is not None
    assert set(submitted.files) == set(own.files)
    assert len(own.files) == FULL
    own.run()
    assert answers([request]) == right()
    assert num_loaded(decode) == FULL
    assert not prefill.replica.held
    assert not prefill.replica.has_unfinished
    assert own.fleet.num_moves == 0


def test_what_is_cached_where_one_decodes_goes_there_and_short_prompts_too() -> None:
    own, (prefill, decode) = world()
    own.submit(request_of(own, PROMPT[:BLOCK_SIZE]))
    assert not prefill.inbox
    own.submit(request_of(own))
    own.run()
    own.fleet.min_prefill_tokens = 2 * BLOCK_SIZE
    own.submit(longer := request_of(own, [*PROMPT[:-1], *[7] * BLOCK_SIZE]))
    assert where(own, longer) == decode.number, "one new block is too little"
    own.run()
    own.submit(longer := request_of(own, [*PROMPT, *[7] * 2 * BLOCK_SIZE]))
    assert where(own, longer) == prefill.number
    own.run()
    whole = own.front.make_request([5] * 20, SamplingParams(max_tokens=3, seed=1))
    submit(own.front, whole)
    whole.sequences[0].reads_cache = False
    own.fleet.submit(whole)
    assert where(own, whole) == decode.number, "it wants all of its prompt computed there"


def test_a_prefill_replica_that_is_lost_or_drained_at_any_step_changes_nothing() -> None:
    for is_killed in (True, False):
        for count in range(8):
            own, (prefill, decode) = world()
            own.submit(request := request_of(own))
            for _ in range(count):
                go_on(own, prefill)
            (own.kill if is_killed else own.drain)(prefill.number)
            assert where(own, request) == decode.number
            own.run()
            assert answers([request]) == right()


def test_when_the_one_that_decodes_is_lost_the_next_one_reads_the_files_too() -> None:
    own, (prefill, first, second) = world(num_decode=2)
    own.submit(request := request_of(own))
    while not request.sequences[0].output_token_ids:
        for member in (prefill, first, second):
            go_on(own, member)
    lost, other = (first, second) if where(own, request) == first.number else (second, first)
    own.kill(lost.number)
    assert where(own, request) == other.number, "and no prompt is prefilled twice"
    own.run()
    assert answers([request]) == right()
    assert num_loaded(other) == FULL


def test_files_that_are_gone_or_cannot_be_written_are_computed_again() -> None:
    own, (prefill, decode) = world()
    own.submit(request := request_of(own))
    for _ in while_at(own, request, prefill):
        assert request in own.fleet.running
    assert own.files
    own.files.clear()
    own.run()
    assert answers([request]) == right()
    assert num_loaded(decode) == 0

    own, (prefill, decode) = world(bad=1.0)
    own.submit(request := request_of(own))
    own.run()
    assert answers([request]) == right()
    assert num_loaded(decode) == own.fleet.num_prefilled == 0


def test_no_more_blocks_wait_to_be_written_than_there_is_memory_for() -> None:
    own, (prefill, _) = world(max_staged=2)
    own.submit(request := request_of(own))
    disk = prefill.offload.disk
    assert disk is not None
    for _ in while_at(own, request, prefill):
        assert len(disk.writing) <= 2
    assert own.files is not None
    assert len(own.files) == FULL, "and all are written in the end"
    own.run()
    assert answers([request]) == right()


def test_a_replica_without_a_folder_refuses_and_an_abort_leaves_nothing() -> None:
    own = World(random.Random(0))
    own.join(prefills=True)
    own.join()
    own.submit(request := request_of(own))
    own.run()
    assert answers([request]) == right()
    assert own.fleet.num_prefilled == 0

    for count in range(8):
        own, (prefill, decode) = world()
        own.submit(request := request_of(own))
        for _ in range(count):
            go_on(own, prefill)
        own.abort(request)
        for _ in range(20):
            go_on(own, prefill)
        assert not prefill.replica.held
        assert not prefill.replica.has_unfinished
        assert not own.fleet.running
        assert own.fleet.prefill_router.load(prefill.number) == own.fleet.router.load(decode.number) == 0


def test_where_nobody_else_decodes_prefill_replicas_do() -> None:
    own, (prefill,) = world(num_decode=0)
    own.submit(request := request_of(own))
    [submitted] = prefill.inbox
    assert isinstance(submitted, Submit)
    assert not submitted.writes
    own.run()
    assert answers([request]) == right()
