"""Shares of blocks: whoever holds the whole pool keeps no other client from its first token."""

from __future__ import annotations

import random
from typing import Any

import pytest

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.sampling_params import CoreSamplingParams as SamplingParams
from nanoengine.core.sequence import Request
from tests.core.toys import VOCAB, check, make_engine, run
from tests.features.fairness.sharing import POLICIES, shared_engine, submit

POOL = {"num_blocks": 60, "max_model_len": 240, "max_num_batched_tokens": 48, "max_chunk": 24, "max_num_seqs": 24}
"""240 tokens. As in a server, decodes take at most half of a step, and one prompt takes no more than that."""

HOLDERS = {
    "one long": [(228, 12, 1)],
    "two that grow": [(30, 90, 1), (30, 90, 1)],
    "many": [(8, 40, 1)] * 5,
    "one with many completions": [(8, 60, 30)],
    "more than there is room for": [(60, 100, 1)] * 12,
}
"""What the other client has asked for: tokens of a prompt, new ones, completions."""


def steps_to_first_token(engine: LLMEngine, request: Request, most: int = 500) -> int:
    for number in range(1, most):
        engine.step()
        check(engine.scheduler)
        if request.sequences[0].output_token_ids:
            return number
    raise AssertionError("it waits for ever")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [3, 50, 80])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_first_token_takes_at_most_twice_its_steps_alone_and_one(
    policy: str, depth: int, length: int, holder: str
) -> None:
    """Steps, not time: how long a step takes, its budget of tokens bounds."""
    alone = make_engine(**POOL, policy=policy, depth=depth)
    steps_alone = steps_to_first_token(alone, submit(alone, length, "newcomer"))
    engine, _ = shared_engine(**POOL, policy=policy, depth=depth)
    held = [submit(engine, count, "holder", max_tokens, n=n) for count, max_tokens, n in HOLDERS[holder]]
    blocks = engine.scheduler.blocks
    while blocks.num_free * blocks.block_size > length:
        engine.step()
        assert engine.has_unfinished, "there was room for the newcomer all the time"
    newcomer = submit(engine, length, "newcomer", 20)
    assert steps_to_first_token(engine, newcomer) <= 2 * steps_alone + 1
    run(engine, [])
    assert [len(seq.output_token_ids) for request in held for seq in request.sequences] == [
        max_tokens for _, max_tokens, n in HOLDERS[holder] for _ in range(n)
    ], "who gave way has all its tokens in the end"


def test_a_sequence_of_more_than_its_part_waits_its_turn() -> None:
    """It neither takes blocks from others nor passes them."""
    engine, _ = shared_engine(**POOL)
    first = submit(engine, 100, "first", 60)
    engine.step()
    large = submit(engine, 150, "large", 5)
    for _ in range(30):
        engine.step()
        check(engine.scheduler)
        assert not large.sequences[0].output_token_ids
    assert first.sequences[0].num_preemptions == 0
    run(engine, [])
    assert len(large.sequences[0].output_token_ids) == 5


def test_who_has_no_more_than_its_part_keeps_it_when_others_grow() -> None:
    """The newcomer is the last in order: without shares it would be the first to give way."""
    engine, _ = shared_engine(**POOL, policy="mixed")
    for _ in range(4):
        submit(engine, 30, "holder", 70)
    for _ in range(12):
        engine.step()
    newcomer = submit(engine, 20, "newcomer", 40)
    while not newcomer.finished:
        engine.step()
        check(engine.scheduler)
    assert newcomer.sequences[0].num_preemptions == 0
    run(engine, [])


@pytest.mark.parametrize("seed", range(12))
def test_shares_of_blocks_change_no_token_and_come_to_an_end(seed: int) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "num_blocks": rng.choice([16, 24]),
        "policy": rng.choice(POLICIES),
        "depth": rng.choice([1, 2]),
        "enable_prefix_caching": rng.random() < 0.5,
        "max_num_batched_tokens": rng.choice([7, 40]),
    }
    wishes = [(rng.randint(1, 40), rng.choice("aabc"), rng.randint(1, 15), rng.choice([1, 1, 4])) for _ in range(14)]
    arrivals = sorted(rng.randint(0, 40) for _ in wishes)
    engine, _ = shared_engine(**options)
    alone = make_engine(num_blocks=900)
    requests: list[tuple[Request, Request]] = []
    for now in range(3000):
        while len(requests) < len(wishes) and arrivals[len(requests)] <= now:
            length, client, max_tokens, n = wishes[len(requests)]
            prompt = [rng.randrange(VOCAB) for _ in range(length)]
            params = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True, seed=len(requests))
            pair = engine.make_request(prompt, params, client=client), alone.make_request(prompt, params)
            for own, request in zip((engine, alone), pair, strict=True):
                own.submit(request)
            requests.append(pair)
        if len(requests) == len(wishes) and not engine.has_unfinished:
            break
        preempted = {seq: seq.num_preemptions for seq in engine.scheduler.running}
        engine.step()
        check(engine.scheduler)
        if options["depth"] == 1:
            again = [
                seq for seq in engine.scheduler.running if seq.num_preemptions > preempted.get(seq, seq.num_preemptions)
            ]
            assert not again, "who gives way does not start again in the same step"
    run(alone, [])
    assert all(together.finished for together, _ in requests)
    for together, expected in requests:
        assert [seq.output_token_ids for seq in together.sequences] == [
            seq.output_token_ids for seq in expected.sequences
        ]
