"""What a request gets from a model with windows does not depend on how it is scheduled, in pools as small as they may be."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import PolicyPart
from nanoengine.features.kv_groups.common_prefix import CommonPrefix
from nanoengine.features.kv_groups.layouts import KVGroup, Need
from tests.core.test_policy_every_way import answers, draw_requests, draw_way
from tests.core.toys import ToyModel, make_engine, run
from tests.features.speculation.toys import ToyDrafter

NUM_WAYS = 30
MAX_LEN = 60
SIZE = 4
WINDOWS: tuple[tuple[int | None, ...], ...] = ((6,), (None, 5), (1, None, 17), (4, 9), (None, None, 70, 8))
CHUNKS: tuple[tuple[int | None, ...], ...] = ((7,), (None, 8, 13))
"""Windows that stand still."""


def groups_of(windows: tuple[int | None, ...]) -> list[KVGroup]:
    return [KVGroup(window, [layer], windows in CHUNKS) for layer, window in enumerate(windows)]


class CheckedPrefix(CommonPrefix):
    """Looks at every plan: the blocks that are said to be common are those of all decodes, and full."""

    num_common = 0

    def complete(self, step: Step) -> None:
        super().complete(step)
        plan, seqs = step.plan, [*step.decodes, *step.runs[: step.plan.num_drafted]]
        starts = [*plan.decode_starts.tolist(), *(run.start for run in plan.runs[: plan.num_drafted])]
        for group, count in enumerate(plan.num_common_blocks):
            first = {tuple(seq.block_tables[group][:count]) for seq in seqs}
            assert len(first) == 1
            assert all(blocks for blocks in first.pop())
            assert count * SIZE <= min(starts)
            self.num_common += count


def windowed_engine(
    windows: tuple[int | None, ...],
    *,
    num_spare: int,
    failing: list[int],
    parts: Seq[PolicyPart] = (),
    **way: Any,
) -> tuple[LLMEngine, CheckedPrefix]:
    """An engine whose pool has `num_spare` blocks more than one sequence may need."""
    most_new = min(way.get("max_chunk") or 8192, way["max_num_batched_tokens"])
    groups = groups_of(windows)
    num_blocks = Need(groups, SIZE, most_new, way["depth"]).num_blocks(MAX_LEN) + num_spare
    layouts = [group.layout(most_new) for group in groups]
    caching = way.pop("enable_prefix_caching")
    blocks = BlockManager(num_blocks, SIZE, layouts, enable_prefix_caching=caching)
    prefix = CheckedPrefix(blocks)
    model = ToyModel(SIZE, failing, layouts=layouts)
    return make_engine(blocks=blocks, model=model, max_model_len=MAX_LEN, parts=[prefix, *parts], **way), prefix


@pytest.mark.parametrize("seed", range(len(WINDOWS + CHUNKS)))
def test_what_a_request_gets_does_not_depend_on_the_way_in_which_it_is_scheduled(seed: int) -> None:
    windows = (WINDOWS + CHUNKS)[seed]
    plain = {"depth": 1, "enable_prefix_caching": False, "max_num_batched_tokens": 8192}
    engine, _ = windowed_engine(windows, num_spare=1000, failing=[], **plain)
    requests = draw_requests(engine, seed)
    run(engine, requests)
    expected = answers(requests)
    truth = {seq.seq_id: seq.token_ids for request in requests for seq in request.sequences}
    rng, seen = random.Random(seed), dict.fromkeys(("preemptions", "cached", "accepted", "failed", "common"), 0)
    for _ in range(NUM_WAYS):
        way, fails = draw_way(rng), rng.random() < 0.3
        del way["num_blocks"]
        drafter = ToyDrafter(truth, rng) if rng.random() < 0.5 else None
        parts = [drafter] if drafter else []
        failing = [rng.randint(2, 12)] if fails else []
        num_spare = rng.choice([0, 1, 5, 400])
        engine, prefix = windowed_engine(windows, num_spare=num_spare, failing=failing, parts=parts, **way)
        requests = draw_requests(engine, seed)
        run(engine, requests)
        for want, got in zip(expected, answers(requests), strict=True):
            if got[1] == "error":
                assert fails, way
                assert got[0] == want[0][: len(got[0])], way
                seen["failed"] += 1
            else:
                assert got == want, way
        seen["preemptions"] += engine.scheduler.num_preemptions
        seen["cached"] += sum(request.output().num_cached_tokens for request in requests)
        seen["accepted"] += drafter.num_accepted if drafter else 0
        seen["common"] += prefix.num_common
    if None not in windows:
        assert not seen.pop("common")
    assert all(seen.values()), f"the rare paths were met: {seen}"


@pytest.mark.parametrize("depth", [1, 2, 5, 9])
def test_who_runs_alone_is_never_preempted_however_many_steps_are_in_flight(depth: int) -> None:
    """With the smallest pool: a block is given back only when the step that filled it has been committed."""
    way = {"depth": depth, "enable_prefix_caching": False, "max_num_batched_tokens": 1}
    engine, _ = windowed_engine((5, 9), num_spare=0, failing=[], **way)
    request = engine.make_request([1, 2, 3], CoreSamplingParams(max_tokens=MAX_LEN - 3, ignore_eos=True))
    run(engine, [request])
    assert len(request.sequences[0].token_ids) == MAX_LEN
    assert engine.scheduler.num_preemptions == 0
