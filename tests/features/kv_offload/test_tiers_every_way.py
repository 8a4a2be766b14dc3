"""What a request gets does not depend on where its blocks have been."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest

from nanoengine.core.seams import KVLayout
from nanoengine.core.sequence import Request
from nanoengine.features.kv_groups.layouts import KVGroup, Need
from tests.core.test_policy_every_way import answers, draw_requests, draw_way
from tests.core.toys import ToyModel, make_engine, run
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
from tests.features.speculation.toys import ToyDrafter

NUM_WAYS = 30
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None,), (None, 5), (4, 9), (None,), (None, 5))
HYBRIDS = (4, 5)
"""Of them have layers with states, too."""


def make_layouts(windows: tuple[int | None, ...], most_new: int) -> list[KVLayout]:
    return [KVGroup(window, [0]).layout(most_new) for window in windows]


def all_sequences(requests: list[Request]) -> list[Any]:
    return [seq for request in requests for seq in request.sequences]


def drive(engine: Any, offload: Any, model: OffloadToy, requests: list[Request], rng: random.Random, hurt: str) -> None:
    """Run requests to their end; sometimes one is aborted, or Ctrl-C comes."""
    for request in requests:
        engine.submit(request)
    num_steps, when = 0, rng.randint(2, 12)
    launch = model.launch

    def interrupted(plan: Any) -> Any:
        done = launch(plan) if rng.random() < 0.5 else None
        if done is not None and rng.random() < 0.5:  # it comes while the result is waited for
            return lambda: _raise()
        raise KeyboardInterrupt

    while engine.has_unfinished:
        if num_steps == when and hurt == "abort":
            engine.abort(rng.choice(requests).request_id)
        model.launch = interrupted if num_steps == when and hurt == "interrupt" else launch  # type: ignore[method-assign]
        with suppress(KeyboardInterrupt):
            engine.step()
        check_offload(engine, offload)
        num_steps += 1
        assert num_steps < 5000, "the engine does not come to an end"
    model.launch = launch  # type: ignore[method-assign]
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks


def _raise() -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("seed", range(len(WINDOWS)))
def test_what_a_request_gets_does_not_depend_on_where_its_blocks_have_been(seed: int) -> None:
    windows = WINDOWS[seed]
    layouts = make_layouts(windows, 8192)
    plain = make_engine(model=ToyModel(SIZE, layouts=layouts), num_blocks=900)
    plain.scheduler.blocks.__init__(900, SIZE, layouts)  # type: ignore[misc]
    requests = draw_requests(plain, seed)
    run(plain, requests)
    expected = answers(requests)
    truth = {seq.seq_id: seq.token_ids for seq in all_sequences(requests)}
    truth |= {seq_id + len(truth): tokens for seq_id, tokens in truth.items()}  # each engine gets the requests twice
    rng, files = random.Random(seed), Files()
    seen = dict.fromkeys(("preemptions", "saved", "loaded", "files", "written", "bad", "failed", "aborted"), 0)
    if seed in HYBRIDS:
        seen |= dict.fromkeys(("restored", "states loaded"), 0)
    for _ in range(NUM_WAYS):
        way, hurt = draw_way(rng), rng.choice(["", "", "fail", "abort", "interrupt"])
        del way["enable_prefix_caching"], way["num_blocks"]
        most_new = min(way["max_chunk"] or 8192, way["max_num_batched_tokens"])
        groups = [KVGroup(window, [0]) for window in windows]
        way["num_blocks"] = Need(groups, SIZE, most_new, way["depth"]).num_blocks(60) + rng.choice([0, 1, 10, 300])
        way["num_slots"], way["max_staged"] = rng.choice([(0, 20), (5, None), (1, 3), (60, None), (8, 40), (60, 40)])
        if rng.random() < 0.3:
            files = Files()
        if seed in HYBRIDS:
            way["num_snapshots"] = rng.choice([0, 1, 3, 50])
        model = (HybridToy if seed in HYBRIDS else OffloadToy)(
            files,
            rng,
            bad=rng.choice([0, 0, 0.2]),
            most_files=rng.choice([9999, 20]),
            failing=[rng.randint(2, 12)] if hurt == "fail" else [],
            layouts=make_layouts(windows, most_new),
        )
        drafter = ToyDrafter(truth, rng) if rng.random() < 0.3 else None
        engine, offload = offload_engine(model, layouts=model.layouts, parts=[drafter] if drafter else [], **way)
        for _ in range(2):
            requests = draw_requests(engine, seed)
            drive(engine, offload, model, requests, rng, hurt)
            for want, got in zip(expected, answers(requests), strict=True):
                if got[1] in ("error", "abort"):
                    assert hurt in ("fail", "abort"), way
                    assert got[0] == want[0][: len(got[0])], way
                    seen["failed"] += got[1] == "error"
                    seen["aborted"] += got[1] == "abort"
                else:
                    assert got == want, way
            assert {str(request.error) for request in requests} <= {"None", "injected"}
            if rng.random() < 0.3:
                assert engine.reset_prefix_cache()
                assert offload.disk is None or not files
        engine.close()
        if (snapshots := snapshots_of(engine)) is not None:
            check_slots(snapshots)
            seen["restored"] += snapshots.num_restored
            seen["states loaded"] += snapshots.num_loaded
        stats = offload.stats
        seen["preemptions"] += engine.scheduler.num_preemptions
        seen["saved"] += stats.num_saved_blocks
        seen["loaded"] += stats.num_loaded_blocks
        seen["files"] += stats.num_loaded_files
        seen["written"] += stats.num_written_files
        seen["bad"] += stats.num_bad_files
    assert all(seen.values()), f"the rare paths were met: {seen}"
