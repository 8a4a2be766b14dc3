"""What a request gets does not depend on where its blocks have been."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.seams import KVLayout
from nanoengine.core.sequence import Request
from nanoengine.features.kv_groups.layouts import BlockDemand, KVGroup
from tests.core.lives import check_lives
from tests.core.toys import ToyModel, make_engine
from tests.features.kv_groups.remembering import check_slots
from tests.features.kv_offload.toys import (
    SIZE,
    Files,
    HybridToy,
    OffloadToy,
    check_offload,
    offload_engine,
    snapshots_of,
)
from tests.features.speculation.toys import Drafted

WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None,), (None, 5), (4, 9), (None,), (None, 5))
HYBRIDS = (4, 5)
"""Of them have layers with states, too."""


def make_layouts(windows: tuple[int | None, ...], most_new: int) -> list[KVLayout]:
    return [KVGroup(window, [0]).layout(most_new) for window in windows]


class Tiers(Drafted):
    """Blocks go to host memory and to files, which several engines have one after the other."""

    rare = (*Drafted.rare, "saved", "loaded", "files", "written", "bad")
    rounds = 2

    def __init__(self, seed: int):
        super().__init__(seed)
        self.windows, self.files, self.is_hybrid = WINDOWS[seed], Files(), seed in HYBRIDS
        self.rare += ("restored", "states loaded") if self.is_hybrid else ()

    def plain_engine(self) -> LLMEngine:
        layouts = make_layouts(self.windows, 8192)
        engine = make_engine(model=ToyModel(SIZE, layouts=layouts))
        engine.scheduler.blocks.__init__(900, SIZE, layouts)  # type: ignore[misc]
        return engine

    def engine(self, way: dict[str, Any], failing: list[int]) -> LLMEngine:
        rng = self.rng
        del way["enable_prefix_caching"], way["num_blocks"]
        most_new = min(way["max_chunk"] or 8192, way["max_num_batched_tokens"])
        groups = [KVGroup(window, [0]) for window in self.windows]
        way["num_blocks"] = BlockDemand(groups, SIZE, most_new, way["depth"]).num_blocks(60) + rng.choice(
            [0, 1, 10, 300]
        )
        way["num_slots"], way["max_staged"] = rng.choice([(0, 20), (5, None), (1, 3), (60, None), (8, 40), (60, 40)])
        if rng.random() < 0.3:
            self.files = Files()
        if self.is_hybrid:
            way["num_snapshots"] = rng.choice([0, 1, 3, 50])
        model = (HybridToy if self.is_hybrid else OffloadToy)(
            self.files,
            rng,
            bad=rng.choice([0, 0, 0.2]),
            most_files=rng.choice([9999, 20]),
            failing=failing,
            layouts=make_layouts(self.windows, most_new),
        )
        engine, self.offload = offload_engine(model, layouts=model.layouts, parts=self.parts(), **way)
        return engine

    def after_step(self, engine: LLMEngine) -> None:
        check_offload(engine, self.offload)

    def after_round(self, engine: LLMEngine, requests: list[Request]) -> None:
        if self.rng.random() < 0.3:
            assert engine.reset_prefix_cache()
            assert self.offload.disk is None or not self.files

    def after_life(self, engine: LLMEngine) -> None:
        super().after_life(engine)
        engine.close()
        if (snapshots := snapshots_of(engine)) is not None:
            check_slots(snapshots)
            self.seen.update({"restored": snapshots.num_restored, "states loaded": snapshots.num_loaded})
        stats = self.offload.stats
        self.seen.update(saved=stats.num_saved_blocks, loaded=stats.num_loaded_blocks, files=stats.num_loaded_files)
        self.seen.update(written=stats.num_written_files, bad=stats.num_bad_files)


@pytest.mark.parametrize("seed", range(len(WINDOWS)))
def test_what_a_request_gets_does_not_depend_on_where_its_blocks_have_been(seed: int) -> None:
    check_lives(Tiers(seed), 30)
