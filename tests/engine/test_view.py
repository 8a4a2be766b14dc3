from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.engine import view as view_module
from nanoengine.engine.kv.groups import KVSpec
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.view import CACHED, FREE, FULL, OPEN, SHARED, EngineView, SequenceView, take_view
from nanoengine.sampling_params import SamplingParams
from tests.engine.engine_toys import Clock, DigitTokenizer, make_engine, run
from tests.engine.test_fetching import FILED, behind_files
from tests.engine.toys import FAST, VOCAB_SIZE, ToyModel


def check(engine: LLMEngine) -> EngineView:
    """A view agrees with itself and with the engine; it survives a trip through JSON."""
    view = take_view(engine)
    pool, cells = view.pool, Counter(view.pool.cells)
    cells[FREE] += pool.num_blocks - len(pool.cells)
    assert (cells[FREE], cells[CACHED]) == (pool.num_free, pool.num_cached)
    assert cells[OPEN] + cells[FULL] + cells[SHARED] == pool.num_used
    assert sum(cells.values()) == pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
    owners = Counter(block for seq in view.sequences for block in seq.blocks)
    in_use = {i: cell for i, cell in enumerate(pool.cells, start=1) if cell in OPEN + FULL + SHARED}
    assert set(owners) == set(in_use)
    assert {block for block, count in owners.items() if count > 1} == {i for i, c in in_use.items() if c == SHARED}
    assert all(seq.num_blocks == len(seq.blocks) for seq in view.sequences)
    assert len(view.sequences) == view.num_running + view.num_fetching + view.num_waiting
    assert msgspec.json.decode(msgspec.json.encode(view), type=EngineView) == view
    return view


def states(view: EngineView) -> list[str]:
    return [seq.state for seq in view.sequences]


def by_id(view: EngineView) -> dict[str, SequenceView]:
    return {f"{seq.request_id}/{seq.index}": seq for seq in view.sequences}


def test_an_idle_engine_has_no_rows_and_a_pool_that_is_free() -> None:
    view = check(make_engine(ToyModel(), num_blocks=64))
    assert (view.sequences, view.pool.cells, view.pool.num_free) == ([], "", 64)


def test_a_request_waits_then_computes_its_prompt_then_generates() -> None:
    engine = make_engine(ToyModel(), eos=(), budget=8, block_size=4)
    engine.add_request([5] * 14, SamplingParams(max_tokens=4), "mine")
    view = check(engine)
    assert (view.num_waiting, states(view)) == (1, ["waiting"])
    seq = view.sequences[0]
    assert (seq.request_id, seq.index, seq.num_prompt, seq.num_computed, seq.num_cached) == ("mine", 0, 14, 0, None)
    engine.step()
    view = check(engine)
    seq = view.sequences[0]
    assert (seq.state, seq.num_computed, seq.num_output, seq.num_cached, seq.num_blocks) == ("prefill", 8, 0, 0, 4)
    assert [view.pool.cells[block - 1] for block in seq.blocks] == [FULL, FULL, OPEN, OPEN]
    engine.step()
    view = check(engine)
    assert (states(view), view.sequences[0].num_computed, view.sequences[0].num_output) == (["decode"], 14, 1)
    run(engine)
    view = check(engine)
    assert (view.sequences, view.pool.num_used) == ([], 0)
    assert set(view.pool.cells) <= {FREE, CACHED}
    assert view.pool.num_cached == 4
    assert (view.totals.prefill_tokens, view.totals.decode_tokens, view.totals.num_requests) == (14, 3, 1)


def test_equal_beginnings_are_shared_and_hits_are_counted() -> None:
    engine = make_engine(ToyModel(), eos=(), block_size=4)
    for i in range(3):
        engine.add_request([*[5] * 8, i], SamplingParams(max_tokens=4), f"r{i}")
    engine.step()
    view = check(engine)
    tables = [seq.blocks for seq in view.sequences]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert [seq.num_cached for seq in view.sequences] == [0, 8, 8]
    assert Counter(view.pool.cells) == {SHARED: 2, OPEN: 3}
    assert (view.totals.num_queried_tokens, view.totals.num_hit_tokens) == (27, 16)


def test_completions_of_a_request_are_rows_of_their_own() -> None:
    engine = make_engine(ToyModel(), eos=(), block_size=4)
    engine.add_request([5] * 6, SamplingParams(n=3, max_tokens=4), "fork")
    assert states(check(engine)) == ["waiting"] * 3
    engine.step()
    view = check(engine)
    assert list(by_id(view)) == ["fork/0", "fork/1", "fork/2"]
    assert Counter(view.pool.cells) == {SHARED: 2}, "the half-full last one too"


def test_a_victim_is_preempted_without_blocks_and_comes_back() -> None:
    engine = make_engine(ToyModel(), eos=(), num_blocks=4, max_model_len=16)
    for name in ("old", "new"):
        engine.add_request([len(name) + ord(name[0])] * 6, SamplingParams(max_tokens=9), name)
    seen = []
    while engine.has_unfinished:
        engine.step()
        seen.append(check(engine))
    victims = [by_id(view)["new/0"] for view in seen if "preempted" in states(view)]
    assert victims
    assert all((seq.blocks, seq.num_blocks, seq.num_preemptions, seq.num_computed) == ([], 0, 1, 0) for seq in victims)
    last = by_id(seen[-2])["new/0"]
    assert (last.state, last.num_preemptions) == ("decode", 1)
    assert (seen[-1].sequences, seen[-1].totals.num_preemptions) == ([], 1)


def test_who_waits_for_files_is_fetching(tmp_path: Path) -> None:
    scheduler, model = behind_files(tmp_path)
    engine = LLMEngine(scheduler, model, DigitTokenizer(), vocab_size=VOCAB_SIZE, clock=Clock())
    engine.add_request(FILED, SamplingParams(max_tokens=4), "filed")
    engine.add_request([7] * 5, SamplingParams(max_tokens=6), "other")
    engine.step()
    view = check(engine)
    assert {name: seq.state for name, seq in by_id(view).items()} == {"other/0": "decode", "filed/0": "fetching"}
    assert (view.num_running, view.num_fetching, view.num_waiting) == (1, 1, 0)
    engine.close()


def test_what_no_token_sees_any_more_is_no_block_of_a_sequence() -> None:
    specs = (KVSpec(), KVSpec("window", 6))
    engine = make_engine(ToyModel(specs=specs), eos=(), specs=specs, block_size=4)
    engine.add_request([5] * 6, SamplingParams(max_tokens=20))
    while engine.has_unfinished:
        engine.step()
        view = check(engine)
        assert all(0 not in seq.blocks for seq in view.sequences)


def test_a_view_does_not_change_with_the_engine() -> None:
    engine = make_engine(ToyModel(), eos=(), block_size=4)
    engine.add_request([5] * 6, SamplingParams(max_tokens=30))
    engine.step()
    view = take_view(engine)
    before = msgspec.json.encode(view)
    run(engine)
    assert msgspec.json.encode(view) == before
    assert take_view(engine) != view


def test_nothing_of_a_prompt_is_in_a_view() -> None:
    engine = make_engine()
    engine.add_request("a most private matter", SamplingParams(max_tokens=3), "id")
    views = [msgspec.json.encode(take_view(engine))]
    while engine.has_unfinished:
        engine.step()
        views.append(msgspec.json.encode(take_view(engine)))
    tokens = ",".join(str(token) for token in b"a most"[:3]).encode()
    assert not any(b"private" in view or tokens in view for view in views)


def test_rows_blocks_and_cells_are_bounded_and_counts_are_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_RUNNING": 3, "MAX_WAITING": 2, "MAX_CELLS": 10, "MAX_TABLE_ENTRIES": 10}.items():
        monkeypatch.setattr(view_module, name, value)
    engine = make_engine(ToyModel(), eos=(), max_num_seqs=5, budget=200, block_size=4)
    for i in range(12):
        engine.add_request([i] * 14, SamplingParams(max_tokens=4), f"r{i}")
    engine.step()
    view = take_view(engine)
    assert (view.num_running, view.num_waiting) == (5, 7)
    assert [seq.request_id for seq in view.sequences] == ["r0", "r1", "r2", "r5", "r6"], "the first in order of each"
    assert [(seq.num_blocks, len(seq.blocks)) for seq in view.sequences] == [(4, 2)] * 3 + [(0, 0)] * 2
    assert len(view.pool.cells) == 10
    assert (view.pool.num_used, view.pool.num_free) == (20, 44)


@FAST
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 3)), min_size=1, max_size=8),
    st.sampled_from(["prefill_first", "mixed"]),
    st.integers(1, 2),
    st.booleans(),
)
def test_views_are_sound_after_every_step(requests: Any, policy: str, depth: int, caching: bool) -> None:
    engine = make_engine(
        ToyModel(), eos=(), num_blocks=10, max_model_len=36, policy=policy, max_steps_in_flight=depth, caching=caching
    )
    for kind, length, n in requests:
        engine.add_request([kind] * length, SamplingParams(n=n, max_tokens=12))
    while engine.has_unfinished:
        engine.step()
        view = check(engine)
        assert {seq.seq_id for seq in engine.scheduler.begun} == {
            engine.scheduler.running[i].seq_id for i, state in enumerate(states(view)) if state == "prefill"
        }
    assert check(engine).sequences == []
