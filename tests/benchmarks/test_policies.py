"""Ways to share out steps, tried on one engine."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.policies import Variant, add_policy_options, scheduling, variants
from nanoengine.engine.scheduler import Scheduler
from tests.engine.toys import ToyModel, add, drain, is_decode, is_prefill, make_scheduler, new_tokens


def asked(scheduler: Scheduler, *arguments: str) -> list[Variant]:
    parser = argparse.ArgumentParser()
    add_policy_options(parser)
    return variants(parser.parse_args(arguments), scheduler)


def test_each_policy_is_tried_with_each_chunk() -> None:
    scheduler = make_scheduler(policy="mixed", max_chunk=16)
    assert asked(scheduler) == [("mixed", 16)], "what is not asked for is as the engine's options say"
    assert asked(scheduler, "--chunk", "4", "8", "4") == [("mixed", 4), ("mixed", 8)]
    both = asked(scheduler, "--policy", "prefill_first", "mixed", "--chunk", "4", "8")
    assert both == [("prefill_first", 4), ("prefill_first", 8), ("mixed", 4), ("mixed", 8)]
    assert both[0].case == {"policy": "prefill_first", "chunk": 4}


def test_a_scheduler_shares_out_its_steps_in_another_way_and_back() -> None:
    scheduler = make_scheduler(block_size=4, policy="prefill_first")
    before = scheduler.max_chunk

    def plans() -> list[list[int]]:
        add(scheduler, 3, 9, max_tokens=3)
        found = drain(scheduler, ToyModel())
        mixed = [plan for plan in found if not is_prefill(plan) and not is_decode(plan)]
        return [new_tokens(plan) for plan in mixed]

    assert plans() == []
    with scheduling(scheduler, Variant("mixed", 4)):
        assert plans() == [[1, 4], [1, 1]]
    assert (scheduler.policy, scheduler.max_chunk) == ("prefill_first", before)
    assert plans() == []


def test_a_scheduler_at_work_is_left_alone() -> None:
    scheduler = make_scheduler()
    add(scheduler, 3)
    with pytest.raises(AssertionError), scheduling(scheduler, Variant("mixed", 4)):
        pass
