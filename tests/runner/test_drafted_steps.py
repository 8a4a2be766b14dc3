"""Runs with drafts in a runner: where their tokens lie in a step, what is left of one whose rows are broken, and any plans."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoengine.engine.messages import UNKNOWN, Chunk, Decodes, Drafted, StepPlan
from nanoengine.runner.inputs import Layout, pack, shape_of
from nanoengine.runner.model_runner import drop_runs
from tests.engine.toys import FAST
from tests.runner.conftest import MakeRunner
from tests.runner.fake_stream import FakeStream
from tests.runner.plans import decodes, execute, fill_with_nan, start
from tests.runner.random_plans import RandomPlans, ToySequence
from tests.runner.test_broken_rows import BEGIN, HEAL, OPTIONS, Broken, Fault
from tests.runner.test_inputs import NUM_ROWS as ROWS_OF_INPUTS
from tests.runner.test_inputs import STREAM, cache_of, new_rows, slots, tensors_of
from tests.runner.texts import BLOCK_SIZE, MAX_LEN, NUM_BLOCKS, NUM_ROWS, Texts

# ---- inputs


def test_runs_with_drafts_stand_between_decodes_and_chunks() -> None:
    started = [start(3, [7] * 6, [2, 9]), start(1, [7] * 7, [5, 3, 8]), start(4, [7] * 3, [6, 4])]
    plan = StepPlan(
        started=[*started, start(0, [90, 91, 92], [1])],
        decodes=decodes((3, 5)),
        drafted=[Drafted(1, 6, (41, 42, 43)), Drafted(4, 2, (44,))],
        chunks=[Chunk(0, 0, 3, (0,))],
    )
    rows = new_rows(plan)
    rows.last_tokens[:] = torch.arange(300, 310)
    inputs = tensors_of(plan, 4, rows)
    assert inputs.input_ids.tolist() == [303, 301, 41, 42, 43, 304, 44, 90, 91, 92]
    assert inputs.positions.tolist() == [5, 6, 7, 8, 9, 2, 3, 0, 1, 2]
    assert slots(inputs) == [37, 14, 15, 32, 33, 26, 27, 4, 5, 6]
    metadata = inputs.metadata[0]
    assert metadata.num_decodes == 3
    assert metadata.query_start_loc.tolist() == [0, 1, 5, 7, 10]
    assert metadata.query_lens_list == [1, 4, 2, 3]
    assert metadata.seq_lens.tolist() == metadata.seq_lens_list == [6, 10, 4, 3]
    assert metadata.block_tables.tolist() == [[2, 9, 0], [5, 3, 8], [6, 4, 0], [1, 0, 0]]
    assert inputs.sampled_tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 9]
    assert inputs.sampled_rows.tolist() == [3, 1, 1, 1, 1, 4, 4, 0]
    assert inputs.sampled_positions.tolist() == [6, 7, 8, 9, 10, 3, 4, 3]
    packed = pack(plan, rows, STREAM)
    assert packed.layout == Layout(4, 10, 8)
    assert shape_of(plan, packed.layout, 4).num_blocks == 3
    assert cache_of(rows).groups == [0]


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Decodes, runs with drafts and chunks of rows that stand anywhere."""
    rows = iter(draw(st.permutations(range(ROWS_OF_INPUTS))))
    computed = st.integers(0, 20)
    one = [(next(rows), draw(computed)) for _ in range(draw(st.integers(0, 3)))]
    drafts = st.lists(st.integers(0, 99), min_size=1, max_size=6).map(tuple)
    drafted = [Drafted(next(rows), draw(computed), draw(drafts)) for _ in range(draw(st.integers(0, 3)))]
    chunks = [
        Chunk(row, draw(computed), draw(st.integers(1, 5)), draw(st.sampled_from([(), (row,), (row, 20 + row)])))
        for row in [next(rows) for _ in range(draw(st.integers(0, 3)))]
    ]
    return StepPlan(decodes=decodes(*one), drafted=drafted, chunks=chunks)


def runs_of(plan: StepPlan) -> Iterator[tuple[int, list[tuple[int, int]], list[tuple[int, int, int]]]]:
    """Of each run its row, token ids (UNKNOWN: the row's last) with positions, and samples: offset in the run, row, position."""
    for row, before in zip(*(column.tolist() for column in plan.decodes), strict=True):
        yield row, [(UNKNOWN, before)], [(0, row, before + 1)]
    for run in plan.drafted:
        tokens = [(token, run.num_computed + i) for i, token in enumerate((UNKNOWN, *run.drafts))]
        yield run.row, tokens, [(i, run.row, position + 1) for i, (_, position) in enumerate(tokens)]
    for chunk in plan.chunks:
        end = chunk.num_computed + chunk.num_new
        tokens = [(1000 * chunk.row + position, position) for position in range(chunk.num_computed, end)]
        yield chunk.row, tokens, [(chunk.num_new - 1, row, end) for row in chunk.samples]


@FAST
@given(plan=plans(), block_size=st.sampled_from([2, 4, 16]))
def test_any_step_with_drafts_is_packed_and_unpacked(plan: StepPlan, block_size: int) -> None:
    if not plan.computes:
        return
    runs = list(runs_of(plan))
    tables = {row: [1 + 30 * row + i for i in range(30)] for row, _, _ in runs}
    told = StepPlan(
        started=[start(row, [1000 * row + i for i in range(30)], tables[row][: 30 // block_size + 1]) for row in tables]
    )
    rows = new_rows(told, width=30)
    rows.last_tokens[:] = torch.arange(300, 310)
    inputs = tensors_of(plan, block_size, rows)
    tokens = [(row, token, position) for row, own, _ in runs for token, position in own]
    assert inputs.input_ids.tolist() == [300 + row if token == UNKNOWN else token for row, token, _ in tokens]
    assert inputs.positions.tolist() == [position for _, _, position in tokens]
    assert slots(inputs) == [
        tables[row][position // block_size] * block_size + position % block_size for row, _, position in tokens
    ]
    lengths = [len(own) for _, own, _ in runs]
    starts = [sum(lengths[:i]) for i in range(len(runs) + 1)]
    assert inputs.metadata[0].query_start_loc.tolist() == starts
    assert inputs.metadata[0].seq_lens.tolist() == [own[-1][1] + 1 for _, own, _ in runs]
    assert inputs.metadata[0].num_decodes == len(plan.decodes.rows) + len(plan.drafted)
    samples = [(first + i, row, at) for first, (_, _, own) in zip(starts, runs, strict=False) for i, row, at in own]
    columns = (inputs.sampled_tokens, inputs.sampled_rows, inputs.sampled_positions)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == samples


# ---- rows that are broken


@FAST
@given(plan=plans(), gone=st.sets(st.integers(0, ROWS_OF_INPUTS)))
def test_runs_are_dropped_with_all_their_samples(plan: StepPlan, gone: set[int]) -> None:
    less, kept = drop_runs(plan, gone)
    runs = [(row, [(row, *sample) for sample in samples]) for row, _, samples in runs_of(plan)]
    left = [row for row, _ in runs if row not in gone]
    assert [row for row, _, _ in runs_of(less)] == left
    samples = [sample for _, own in runs for sample in own]
    assert [samples[i] for i in kept] == [sample for row, own in runs if row not in gone for sample in own]
    assert less.num_samples == len(kept)
    assert isinstance(less.decodes, Decodes)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first", "last"])
def test_a_broken_row_has_no_tokens_and_no_draft_of_it_is_accepted(make: MakeRunner, order: tuple[int, int]) -> None:
    right, runner = fill_with_nan(make(**OPTIONS)), fill_with_nan(make(**OPTIONS))
    execute(right, StepPlan(started=BEGIN.started[1:], chunks=BEGIN.chunks[1:]))
    expected = [execute(right, StepPlan(decodes=decodes((2, position)))) for position in range(6, 11)]
    tokens = [result.token_ids[0] for result in expected]
    Fault(runner, "behind the sampler", {1})
    execute(runner, BEGIN)
    with pytest.raises(Broken):
        runner.launch(StepPlan(drafted=[Drafted(0, 21, (1, 2))]))
    runs = [Drafted(0, 24, (5,)), Drafted(2, 6, (tokens[0], tokens[1], tokens[2] ^ 1, tokens[3]))]
    result = execute(runner, StepPlan(drafted=[runs[i] for i in order]))
    first = 2 if order == (0, 1) else 0
    assert result.num_accepted == [[0, 2][i] for i in order]
    assert result.token_ids[first : first + 3] == tokens[:3]
    assert result.token_ids[first + 5 :] + result.token_ids[:first] == [UNKNOWN, UNKNOWN]
    assert result.error is None
    assert set(result.logprobs) == set(range(first, first + 5))
    assert [list(result.logprobs[first + i]) for i in range(3)] == [list(expected[i].logprobs[0]) for i in range(3)]
    healed = execute(runner, StepPlan(started=HEAL.started[:1], decodes=decodes((2, 9)), chunks=HEAL.chunks[:1]))
    assert healed.token_ids[0] == tokens[3]
    assert healed.token_ids[1] >= 0


# ---- any plans


class DraftingPlans(RandomPlans):
    """Some that would decode have drafts: right ones up to a drawn place.

    What was accepted is known here, so a row may be in the next plan before anybody has seen it.
    """

    def next(self) -> StepPlan:
        self.runs: list[tuple[Drafted, int, list[int]]] = []  # how many are accepted, and what is sampled up to there
        plan = super().next()
        plan.drafted = [run for run, _, _ in self.runs]
        self.num_decodes = len(plan.decodes.rows)
        return plan

    def _run(self, seq: ToySequence) -> None:
        room = self.max_len - seq.num_tokens - 1
        if seq.num_tokens - seq.num_computed != 1 or room < 1 or self.rng.random() < 0.4:
            super()._run(seq)
            return
        text = self._tokens(seq)[seq.num_tokens :]
        drafts = text[: self.rng.randint(1, min(room, 9))]
        accepted = self.rng.randint(0, len(drafts))
        drafts[accepted:] = [(token + self.rng.randint(1, 200)) % 300 for token in drafts[accepted:]]
        if self._make_room(seq, 1 + len(drafts)):
            self.runs.append((Drafted(seq.row, seq.num_computed, tuple(drafts)), accepted, text[: accepted + 1]))
            seq.num_computed += accepted + 1
            seq.num_tokens += accepted + 1


@pytest.mark.parametrize("kernels", ["torch", "native"])
@settings(
    max_examples=7,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(rng=st.randoms(use_true_random=True), depth=st.integers(1, 3))
def test_any_plans_sample_what_each_row_gets_alone(
    make: MakeRunner, native_folder: Path, texts: Texts, kernels: str, rng: random.Random, depth: int
) -> None:
    """Rows begin, end, are resumed and forked; blocks are shared and copied; nobody waits for anything."""
    options: dict[str, Any] = {**Texts.options, "kernels": kernels}
    runner = fill_with_nan(make(at=native_folder, stream=FakeStream(seed=rng.randrange(100)), **options))
    plans = DraftingPlans(rng, NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE, MAX_LEN, texts, params=Texts.params)
    flight: deque[Any] = deque()
    seen: Counter[str] = Counter()

    def take() -> None:
        step, expected, runs, first = flight.popleft()
        result = step.result()
        assert result.num_accepted == [accepted for _, accepted, _ in runs]
        assert result.token_ids[:first] == expected[:first]
        for run, accepted, tokens in runs:
            assert result.token_ids[first : first + accepted + 1] == tokens
            first += run.num_new
            seen.update(drafts=len(run.drafts), accepted=accepted)
        assert result.token_ids[first:] == expected[len(expected) - len(result.token_ids) + first :]

    for _ in range(25):
        plan = plans.next()
        flight.append((runner.launch(plan), plans.expected, plans.runs, plans.num_decodes))
        if len(flight) == depth:
            take()
    while flight:
        take()
    runner.close()
    assert 0 < seen["accepted"] < seen["drafts"]
