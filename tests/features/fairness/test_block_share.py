"""Shares of blocks: whoever holds the whole pool keeps no other client from its first token."""

from __future__ import annotations

import pytest

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.sequence import Request
from tests.core.toys import check, make_engine, run
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
@pytest.mark.parametrize("length", [8, 50, 80])
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


def test_with_more_clients_than_rows_each_has_its_first_token_soon() -> None:
    engine, _ = shared_engine(**POOL | {"max_num_seqs": 2})
    for _ in range(2):
        submit(engine, 8, "holder", 100)
    engine.step()
    for newcomer in [submit(engine, 3, client, 5) for client in "abc"]:
        steps_to_first_token(engine, newcomer, 30)
    run(engine, [])


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
