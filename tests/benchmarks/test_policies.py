"""Ways to share out steps, tried on one engine."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.drive import Kind, drive
from benchmarks.policies import Variant, add_policy_options, scheduling, variants
from benchmarks.workload import Workload
from nanoengine.core.scheduler import Scheduler
from tests.core.toys import make_engine


def asked(scheduler: Scheduler, *arguments: str) -> list[Variant]:
    parser = argparse.ArgumentParser()
    add_policy_options(parser)
    return variants(parser.parse_args(arguments), scheduler)


def test_each_policy_is_tried_with_each_chunk() -> None:
    scheduler = make_engine(policy="mixed", max_chunk=16).scheduler
    assert asked(scheduler) == [("mixed", 16)], "what is not asked for is as the engine's options say"
    assert asked(scheduler, "--chunk", "4", "8", "4") == [("mixed", 4), ("mixed", 8)]
    both = asked(scheduler, "--policy", "prefill_first", "mixed", "--chunk", "4", "8")
    assert both == [("prefill_first", 4), ("prefill_first", 8), ("mixed", 4), ("mixed", 8)]
    assert both[0].case == {"policy": "prefill_first", "chunk": 4}


def test_a_scheduler_shares_out_its_steps_in_another_way_and_back() -> None:
    engine = make_engine(enable_prefix_caching=False)
    scheduler, before = engine.scheduler, engine.scheduler.max_chunk

    def mixed_steps() -> list[int]:
        run = drive(engine, Workload([[1] * 3, [2] * 9], [3, 3]), lambda _: None)
        return [step.work.num_tokens for step in run.steps if step.kind is Kind.MIXED]

    assert mixed_steps() == []
    with scheduling(scheduler, Variant("mixed", 4)):
        assert mixed_steps() == [1 + 4, 1 + 1]
    assert (scheduler.policy, scheduler.max_chunk) == ("prefill_first", before)
    assert mixed_steps() == []


def test_a_scheduler_at_work_is_left_alone() -> None:
    engine = make_engine()
    engine.submit(engine.make_request([1, 2, 3]))
    with pytest.raises(AssertionError), scheduling(engine.scheduler, Variant("mixed", 4)):
        pass
