"""What a request gets from a model with windows does not depend on how it is scheduled, in pools as small as they may be."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import PolicyPart
from nanoengine.features.kv_groups.common_prefix import CommonPrefix
from nanoengine.features.kv_groups.layouts import BlockDemand, KVGroup
from tests.core.lives import check_lives
from tests.core.toys import ToyModel, make_engine
from tests.features.speculation.toys import Drafted

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
    num_blocks = BlockDemand(groups, SIZE, most_new, way["depth"]).num_blocks(MAX_LEN) + num_spare
    layouts = [group.layout(most_new) for group in groups]
    caching = way.pop("enable_prefix_caching")
    blocks = BlockManager(num_blocks, SIZE, layouts, enable_prefix_caching=caching)
    prefix = CheckedPrefix(blocks)
    model = ToyModel(SIZE, failing, layouts=layouts)
    return make_engine(blocks=blocks, model=model, max_model_len=MAX_LEN, parts=[prefix, *parts], **way), prefix


class Windowed(Drafted):
    """Models with these windows, in pools of about one sequence."""

    def __init__(self, seed: int, windows: tuple[int | None, ...]):
        super().__init__(seed)
        self.windows = windows
        self.rare += ("common",) if None in windows else ()

    def plain_engine(self) -> LLMEngine:
        way = {"depth": 1, "enable_prefix_caching": False, "max_num_batched_tokens": 8192}
        return windowed_engine(self.windows, num_spare=1000, failing=[], **way)[0]

    def engine(self, way: dict[str, Any], failing: list[int]) -> LLMEngine:
        num_spare = self.rng.choice([0, 0, 1, 5, 400])
        del way["num_blocks"]
        engine, self.prefix = windowed_engine(
            self.windows, num_spare=num_spare, failing=failing, parts=self.parts(), **way
        )
        return engine

    def after_life(self, engine: LLMEngine) -> None:
        super().after_life(engine)
        self.seen["common"] += self.prefix.num_common


@pytest.mark.parametrize("windows", WINDOWS + CHUNKS, ids=str)
def test_what_a_request_gets_does_not_depend_on_the_way_in_which_it_is_scheduled(
    windows: tuple[int | None, ...],
) -> None:
    plug = Windowed((WINDOWS + CHUNKS).index(windows), windows)
    check_lives(plug, 40)
    assert None in windows or not plug.seen["common"]
