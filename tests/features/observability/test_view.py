"""The view agrees with the engine (after every step: test_observer.py), and tells nothing of anybody's text."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from nanoengine.features.observability import view as view_module
from nanoengine.features.observability.view import (
    CACHED,
    FREE,
    FULL,
    OPEN,
    SHARED,
    EngineView,
    SequenceView,
    view_of_engine,
)
from tests.core.toys import run

from .toys import Observed


def look(observed: Observed) -> EngineView:
    """A view agrees with itself and with the engine; it survives a trip through JSON."""
    view = view_of_engine(observed.engine, observed.observer)
    pool, cells = view.pool, Counter(view.pool.cells)
    cells[FREE] += pool.num_blocks - len(pool.cells)
    assert (cells[FREE], cells[CACHED]) == (pool.num_free, pool.num_cached)
    assert cells[OPEN] + cells[FULL] + cells[SHARED] == pool.num_used
    assert sum(cells.values()) == pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
    owners = Counter(block for seq in view.sequences for block in seq.blocks)
    in_use = {i: cell for i, cell in enumerate(pool.cells, start=1) if cell in OPEN + FULL + SHARED}
    assert set(owners) == set(in_use)
    assert {block for block, count in owners.items() if count > 1} == {i for i, c in in_use.items() if c == SHARED}
    assert len(view.sequences) == view.num_running + view.num_fetching + view.num_waiting
    assert msgspec.json.decode(msgspec.json.encode(view), type=EngineView) == view
    return view


def states(view: EngineView) -> list[str]:
    return [seq.state for seq in view.sequences]


def by_id(view: EngineView) -> dict[str, SequenceView]:
    return {f"{seq.request_id}/{seq.index}": seq for seq in view.sequences}


def test_a_request_waits_then_computes_its_prompt_then_generates() -> None:
    observed = Observed(max_num_batched_tokens=8)
    observed.add([5] * 14, 4, "mine")
    view = look(observed)
    assert (view.num_waiting, states(view)) == (1, ["waiting"])
    seq = view.sequences[0]
    assert (seq.request_id, seq.index, seq.num_prompt, seq.num_cached) == ("mine", 0, 14, None)
    observed.engine.step()
    view = look(observed)
    seq = view.sequences[0]
    assert (seq.state, seq.num_output, seq.num_cached, len(seq.blocks)) == ("prefill", 0, 0, 4)
    assert [view.pool.cells[block - 1] for block in seq.blocks] == [FULL, FULL, OPEN, OPEN]
    observed.engine.step()
    view = look(observed)
    assert (states(view), view.sequences[0].num_output) == (["decode"], 1)
    run(observed.engine, [])
    view = look(observed)
    assert (view.sequences, view.pool.num_used) == ([], 0)
    assert set(view.pool.cells) <= {FREE, CACHED}
    assert view.pool.num_cached == 4
    assert (view.totals.prefill_tokens, view.totals.decode_tokens) == (14, 3)


def test_a_victim_is_preempted_without_blocks_and_comes_back() -> None:
    observed = Observed(num_blocks=4, max_model_len=16)
    for token, name in enumerate(("old", "new"), 1):
        observed.add([token] * 6, 9, name)
    seen = []
    while observed.engine.has_unfinished:
        observed.engine.step()
        seen.append(look(observed))
    victims = [by_id(view)["new/0"] for view in seen if "preempted" in states(view)]
    assert victims
    assert all(seq.blocks == [] for seq in victims)
    assert by_id(seen[-2])["new/0"].state == "decode"
    assert (seen[-1].sequences, seen[-1].totals.num_preemptions) == ([], 1)


def test_nothing_of_a_prompt_is_in_a_view() -> None:
    observed = Observed()
    prompt = observed.engine.tokenizer.encode("a most private matter")
    observed.add(prompt, 3, "id")
    views = [msgspec.json.encode(view_of_engine(observed.engine, observed.observer))]
    while observed.engine.has_unfinished:
        observed.engine.step()
        views.append(msgspec.json.encode(view_of_engine(observed.engine, observed.observer)))
    tokens = ",".join(map(str, prompt[:3])).encode()
    assert not any(tokens in view for view in views)


def test_rows_blocks_and_cells_are_bounded_and_counts_are_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_RUNNING": 3, "MAX_WAITING": 2, "MAX_CELLS": 10, "MAX_TABLE_ENTRIES": 10}.items():
        monkeypatch.setattr(view_module, name, value)
    observed = Observed(max_num_seqs=5, max_num_batched_tokens=200, num_blocks=64)
    for i in range(12):
        observed.add([i] * 14, 4, f"r{i}")
    observed.engine.step()
    view = view_of_engine(observed.engine, observed.observer)
    assert (view.num_running, view.num_waiting) == (5, 7)
    assert [seq.request_id for seq in view.sequences] == ["r0", "r1", "r2", "r5", "r6"], "the first in order of each"
    assert [len(seq.blocks) for seq in view.sequences] == [2] * 3 + [0] * 2
    assert len(view.pool.cells) == 10
    assert (view.pool.num_used, view.pool.num_free) == (20, 44)


def test_sequences_that_wait_for_files_are_shown_apart() -> None:
    observed = Observed(max_num_seqs=1)
    for i in range(4):
        observed.add([i] * 9, 4, f"r{i}")
    observed.engine.step()
    observed.sources["fetching"] = lambda: observed.engine.scheduler.waiting[1:2]
    view = look(observed)
    assert (view.num_running, view.num_fetching, view.num_waiting) == (1, 1, 2)
    shown = [(seq.request_id, seq.state) for seq in view.sequences]
    assert shown == [("r0", "decode"), ("r2", "fetching"), ("r1", "waiting"), ("r3", "waiting")]
