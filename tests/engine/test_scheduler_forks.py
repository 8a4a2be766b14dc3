"""Completions of one prompt: it is computed once, and each goes on from there in blocks of its own."""

from __future__ import annotations

import itertools

import pytest

from nanoengine.engine.messages import Chunk, StepPlan, Tier
from nanoengine.engine.sequence import Sequence
from nanoengine.sampling_params import SamplingParams
from tests.engine.toys import (
    VOCAB_SIZE,
    ToyModel,
    ToyRow,
    add_family,
    assert_idle,
    continuation,
    drain,
    make_scheduler,
    run_step,
)


class Diverging(ToyModel):
    """Its first tokens differ from row to row, so that the completions of a prompt go different ways."""

    def choose(self, row: ToyRow, token: int) -> int:
        return (token + row.sampling.seed) % VOCAB_SIZE


def alone(prompt: list[int], index: int, max_tokens: int) -> list[int]:
    """What a completion generates that shares nothing with anybody."""
    scheduler = make_scheduler(caching=False)
    seq = Sequence(0, prompt, SamplingParams(max_tokens=max_tokens), index=index)
    scheduler.add(seq)
    drain(scheduler, Diverging())
    return seq.output_token_ids


def copies(plans: list[StepPlan]) -> int:
    moves = itertools.chain.from_iterable(plan.transfers for plan in plans)
    return sum(move.source.tier is move.target.tier is Tier.DEVICE for move in moves)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("budget", [4, 64])
def test_a_prompt_is_computed_once_for_all_its_completions(length: int, caching: bool, budget: int) -> None:
    scheduler, model = make_scheduler(caching=caching, budget=budget), Diverging()
    prompt = list(range(length))
    family = add_family(scheduler, prompt, 4, max_tokens=7)
    drain(scheduler, model)
    assert model.num_computed == length + 4 * 6
    assert scheduler.num_forks == 3
    assert [seq.output_token_ids for seq in family] == [alone(prompt, i, 7) for i in range(4)]
    assert len({tuple(seq.output_token_ids) for seq in family}) == 4
    assert copies(model.plans) == (3 if length % 4 else 0)
    assert_idle(scheduler)


def test_the_prompt_samples_one_token_for_each_completion_from_one_row() -> None:
    scheduler = make_scheduler()
    add_family(scheduler, [1] * 6, 3, max_tokens=4)
    plan = scheduler.schedule()
    assert plan.chunks == [Chunk(0, 0, 6, (0, 1, 2))]
    assert [start.row for start in plan.started] == [0, 1, 2]
    assert len({start.sampling.seed for start in plan.started}) == 3
    first, *children = [start.tables[0] for start in plan.started]
    assert all(table == first for table in children)
    assert plan.transfers == [], "nobody writes yet"


def test_the_copies_are_in_the_batch_in_which_the_forks_first_write() -> None:
    scheduler, model = make_scheduler(), Diverging()
    add_family(scheduler, [1] * 6, 3, max_tokens=5)
    run_step(scheduler, model)
    plan = run_step(scheduler, model)
    targets = {transfer.target.where for transfer in plan.transfers}
    sources = {transfer.source.where for transfer in plan.transfers}
    assert len(plan.transfers) == len(targets) == 2
    assert [(entries.first, *entries.block_ids) for entries in plan.tables] == [(1, block) for block in sorted(targets)]
    tails = {seq.block_tables[0][1] for seq in scheduler.running}
    assert tails == targets | sources, "two copies, and the last holder keeps the block"
    assert copies([run_step(scheduler, model) for _ in range(2)]) == 0


@pytest.mark.parametrize("caching", [True, False])
def test_more_completions_than_may_run_at_once(caching: bool) -> None:
    scheduler, model = make_scheduler(max_num_seqs=3, caching=caching), Diverging()
    prompt = list(range(10))
    family = add_family(scheduler, prompt, 8, max_tokens=5)
    drain(scheduler, model)
    assert [seq.output_token_ids for seq in family] == [alone(prompt, i, 5) for i in range(8)]
    assert scheduler.num_forks == 2
    again = (
        2 if caching else 10
    )  # what a later completion computes of the prompt: no more than its last, half-full block
    assert model.num_computed == 10 + 5 * again + 8 * 4
    assert_idle(scheduler)


@pytest.mark.parametrize("caching", [True, False])
def test_completions_go_on_when_the_first_ends_at_its_first_token(caching: bool) -> None:
    scheduler, model = make_scheduler(caching=caching), Diverging()
    prompt = [3] * 6
    [first] = alone(prompt, 0, 1)
    family = add_family(scheduler, prompt, 3, max_tokens=6, stop_token_ids=[first])
    run_step(scheduler, model)
    assert family[0].finish_reason == "stop"
    drain(scheduler, model)
    assert [seq.output_token_ids for seq in family[1:]] == [alone(prompt, i, 6) for i in (1, 2)]
    assert_idle(scheduler)


@pytest.mark.parametrize("when", ["waiting", "between chunks", "in flight", "running"])
@pytest.mark.parametrize("caching", [True, False])
def test_completions_go_on_when_the_first_is_aborted(when: str, caching: bool) -> None:
    scheduler, model = make_scheduler(budget=4 if when == "between chunks" else 64, caching=caching), Diverging()
    prompt = [3] * 6
    family = add_family(scheduler, prompt, 3, max_tokens=6)
    if when == "in flight":
        plan = scheduler.schedule()
        scheduler.finish(family[0], "abort")
        scheduler.check()
        advanced = scheduler.update(plan, model.execute(plan))
        assert advanced.seqs == family[1:]
    else:
        for _ in range({"waiting": 0, "between chunks": 1, "running": 3}[when]):
            run_step(scheduler, model)
        scheduler.finish(family[0], "abort")
    drain(scheduler, model)
    assert [seq.output_token_ids for seq in family[1:]] == [alone(prompt, i, 6) for i in (1, 2)]
    assert_idle(scheduler)


def test_a_child_aborted_in_flight_gets_no_token_and_moves_no_other() -> None:
    scheduler, model = make_scheduler(), Diverging()
    family = add_family(scheduler, [3] * 6, 3, max_tokens=6)
    plan = scheduler.schedule()
    scheduler.finish(family[1], "abort")
    scheduler.update(plan, model.execute(plan))
    assert family[1].output_token_ids == []
    drain(scheduler, model)
    assert [family[i].output_token_ids for i in (0, 2)] == [alone([3] * 6, i, 6) for i in (0, 2)]
    assert_idle(scheduler)


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_a_failing_step_ends_all_forks_in_it_and_serves_nobody_its_garbage(step: int, caching: bool) -> None:
    scheduler, model = make_scheduler(caching=caching), Diverging()
    prompt = [3] * 8
    family = add_family(scheduler, prompt, 3, max_tokens=6)
    for _ in range(step):
        run_step(scheduler, model)
    model.fail_if = lambda _: True
    with pytest.raises(RuntimeError):
        model.execute(scheduler.schedule())
    assert scheduler.fail() == family
    assert {seq.finish_reason for seq in family} == {"error"}
    assert_idle(scheduler)
    model.fail_if = lambda _: False
    again = add_family(scheduler, prompt, 2, first_id=10, max_tokens=6)
    drain(scheduler, model)
    assert [seq.output_token_ids for seq in again] == [alone(prompt, i, 6) for i in range(2)]


@pytest.mark.parametrize("num_blocks", [4, 5, 6, 8, 12])
@pytest.mark.parametrize("caching", [True, False])
def test_families_on_a_tiny_pool_generate_what_they_would_alone(num_blocks: int, caching: bool) -> None:
    scheduler = make_scheduler(num_blocks=num_blocks, max_model_len=16, max_num_seqs=5, caching=caching)
    model = Diverging()
    prompts = [[family] * (1 + 3 * family) for family in range(4)]
    families = [add_family(scheduler, prompt, 4, first_id=4 * i, max_tokens=6) for i, prompt in enumerate(prompts)]
    drain(scheduler, model)
    for prompt, family in zip(prompts, families, strict=True):
        assert [seq.output_token_ids for seq in family] == [alone(prompt, i, 6) for i in range(4)]
    assert_idle(scheduler)
    if num_blocks < 6:
        assert scheduler.num_preemptions > 0


def test_a_prompt_that_fills_the_pool_can_be_forked() -> None:
    """The copies find no block: the newest give way until the oldest is alone with its last block."""
    scheduler, model = make_scheduler(num_blocks=4, max_model_len=16), Diverging()
    prompt = list(range(14))
    family = add_family(scheduler, prompt, 3, max_tokens=2)
    drain(scheduler, model, limit=50)
    assert [seq.output_token_ids for seq in family] == [alone(prompt, i, 2) for i in range(3)]
    assert scheduler.num_preemptions > 0
    assert_idle(scheduler)


def test_equal_families_share_the_prompt_through_the_cache() -> None:
    scheduler, model = make_scheduler(), ToyModel()
    prompt = list(range(9))
    families = [add_family(scheduler, prompt, 2, first_id=2 * i, max_tokens=3) for i in range(2)]
    drain(scheduler, model)
    assert model.num_computed == 9 + 1 + 4 * 2
    assert all(seq.output_token_ids == continuation(prompt, 3) for family in families for seq in family)
