"""The message is the whole truth: whoever has the plans alone knows what the scheduler knows, and hears nothing twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.engine.scheduler import POLICIES
from nanoengine.sampling_params import BeamSearchParams
from tests.engine.engine_toys import make_engine
from tests.engine.late_model import LateModel
from tests.engine.plan_mirror import PlanMirror
from tests.engine.test_beam_search import BeamModel
from tests.engine.toys import FAST, ToyModel, add, answer, is_decode, make_scheduler, make_sequence, run_step
from tests.engine.workload import NO_EOS, Wish, assert_as_alone, serve, wishes


class LateBeams(BeamModel, LateModel):
    """A model that is always behind and reports log probabilities."""


@settings(FAST, max_examples=120)
@given(
    workload=st.lists(wishes, min_size=1, max_size=7),
    beams=st.integers(0, 2),
    num_blocks=st.integers(9, 24),
    budget=st.sampled_from([3, 8, 64]),
    max_num_seqs=st.integers(3, 8),
    caching=st.booleans(),
    policy=st.sampled_from(POLICIES),
    max_chunk=st.sampled_from([None, 2, 5]),
    max_steps_in_flight=st.sampled_from([1, 2, 3]),
)
def test_a_mirror_that_has_the_plans_alone_equals_the_scheduler_at_every_step(
    workload: list[Wish], beams: int, **options: Any
) -> None:
    engine = make_engine(LateBeams(), eos=NO_EOS, max_model_len=30, **options)
    mirror = PlanMirror(engine.scheduler)
    for i in range(beams):
        search = BeamSearchParams(beam_width=2 + i % 2, max_tokens=5)
        engine.submit(engine.make_beam_request([1, 1, 1, 5 + i], search))
    assert_as_alone(engine, workload, serve(engine, workload))
    assert mirror.num_plans == len(engine.executor.plans)  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_mirror_sees_preemptions_forks_hits_and_copies(policy: str) -> None:
    """The traces above are worth something: in one of their kind, everything happens."""
    engine = make_engine(
        LateBeams(), eos=NO_EOS, max_model_len=30, num_blocks=9, policy=policy, max_steps_in_flight=2, max_chunk=5
    )
    PlanMirror(engine.scheduler)
    workload = [Wish((1, 1, 1, 1, 1, i % 2), 12, 1 + i % 3, frozenset({3}), i, 9 if i == 2 else None) for i in range(8)]
    assert_as_alone(engine, workload, serve(engine, workload))
    scheduler = engine.scheduler
    assert scheduler.num_preemptions > 3
    assert scheduler.num_forks > 3
    assert scheduler.block_manager.stats.num_hit_tokens > 0
    assert scheduler.block_manager.stats.num_copied_blocks > 3


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_a_steady_decode_step_says_nothing_but_its_runs_and_touches_no_sequence(
    policy: str, depth: int, caching: bool
) -> None:
    block_size, num_seqs, num_tokens = 16, 8, 96
    scheduler = make_scheduler(num_blocks=200, block_size=block_size, max_model_len=200, caching=caching, policy=policy)
    mirror = PlanMirror(scheduler)
    add(scheduler, *[5] * num_seqs, max_tokens=num_tokens)
    in_flight = []
    while scheduler.has_unfinished:
        while len(in_flight) < depth and (plan := scheduler.schedule()):
            in_flight.append(plan)
        plan = in_flight.pop(0)
        scheduler.update(plan, answer(plan))
    # Of each sequence: when it comes, when its last token is near, and at each new block; with a step in flight a block that
    # has just been filled is looked at a second time, when its tokens are known, if they are to be published.
    num_blocks = -(-(5 + num_tokens) // block_size)
    assert scheduler.num_checks <= num_seqs * ((2 if depth > 1 and caching else 1) * num_blocks + 2)
    assert scheduler.num_checks < num_seqs * num_tokens / 5
    assert mirror.num_quiet >= num_tokens - num_blocks - 3


def test_a_block_is_told_with_the_step_that_needs_it_and_a_start_with_the_first() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, [1] * 6, max_tokens=20))
    model = ToyModel()
    for _ in range(18):
        plan = run_step(scheduler, model)
        assert bool(plan.started) == (not is_decode(plan))
        assert bool(plan.tables) == (is_decode(plan) and plan.decodes.num_computed[0] % 4 == 0)
