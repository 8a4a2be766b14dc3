"""The warm-up's plans: as large as a step may be, and such as the runner can compute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nanoengine.engine.messages import StepPlan
from nanoengine.runner.warm_up import largest_plans
from tests.runner.conftest import MakeRunner
from tests.runner.plans import execute

CASES = [
    # max_num_seqs, max_num_batched_tokens, max_len, block_size
    (7, 100, 1000, 16),
    (7, 100, 100, 16),
    (7, 100, 30, 16),  # a budget for several prompts, the last one shorter
    (7, 100, 2, 16),  # more budget than the sequences that may run can use
    (300, 100, 1000, 1),  # more sequences than a step has tokens for
    (1, 1, 2, 4),
]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[int, ...]]:
    return request.param


def runs_of(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(row, tokens before, new tokens) of each run."""
    decodes = zip(plan.decodes.rows.tolist(), plan.decodes.num_computed.tolist(), strict=True)
    return [(row, before, 1) for row, before in decodes] + [(c.row, c.num_computed, c.num_new) for c in plan.chunks]


def check_shape(plan: StepPlan, max_num_seqs: int, max_len: int, block_size: int) -> None:
    """What every plan of a scheduler fulfils."""
    started = {start.row: start for start in plan.started}
    runs = runs_of(plan)
    assert len(started) == len(plan.started) == len(runs) <= max_num_seqs
    assert {row for row, _, _ in runs} == started.keys()
    assert all(0 <= row < max_num_seqs for row in started)
    for row, computed, new in runs:
        tokens, (table,) = started[row].token_ids, started[row].tables
        assert computed >= 0
        assert new >= 1
        assert computed + new == len(tokens) <= min(max_len, len(table) * block_size)
        assert 0 not in table, "the null block is never written"
        assert len(set(table)) == len(table)


def test_prefills_fill_the_token_budget_or_all_sequences(case: tuple[int, ...]) -> None:
    max_num_seqs, budget, max_len, block_size = case
    long, short, _ = largest_plans(max_num_seqs, budget, max_len, block_size)
    for prefill in (long, short):
        assert not len(prefill.decodes.rows)
        assert prefill.num_new_tokens == min(budget, max_num_seqs * max_len)
        check_shape(prefill, max_num_seqs, max_len, block_size)
    assert max(chunk.num_new for chunk in long.chunks) == min(budget, max_len)
    assert len(short.chunks) == min(max_num_seqs, budget)


def test_the_decode_is_of_as_many_sequences_as_may_run(case: tuple[int, ...]) -> None:
    max_num_seqs, budget, max_len, block_size = case
    *_, decode = largest_plans(max_num_seqs, budget, max_len, block_size)
    assert not decode.chunks
    assert len(decode.decodes.rows) == min(max_num_seqs, budget)
    assert set(decode.decodes.num_computed.tolist()) == {min(budget, max_len) - 1}, "and as long as they may get"
    check_shape(decode, max_num_seqs, max_len, block_size)


def test_every_row_is_sampled_the_costly_way(case: tuple[int, ...]) -> None:
    """A greedy step needs less memory than one with filters, counts of tokens take some for good, and log probabilities of
    rows whose logits are changed take a copy of them. Those of prompts take some, however few sequences may run.
    """
    for plan in largest_plans(*case):
        assert [row for chunk in plan.chunks for row in chunk.samples] == [chunk.row for chunk in plan.chunks]
        for start in plan.started:
            params = start.sampling.params
            assert params.temperature > 0
            assert params.top_k > 0
            assert params.top_p < 1
            assert params.frequency_penalty
            assert params.logprobs
            assert start.sampling.prompt_logprobs
            assert start.sampling.num_prompt_tokens == len(start.token_ids)


def test_sequences_share_one_block_table(case: tuple[int, ...]) -> None:
    """So that the warm-up needs a cache of one sequence, before it is known how large a cache may be."""
    _, budget, max_len, block_size = case
    tables = [start.tables for plan in largest_plans(*case) for start in plan.started]
    assert all(table == tables[0] for table in tables)
    ((table,), *_) = tables
    assert len(table) == -(-min(budget, max_len) // block_size)


def test_a_runner_computes_them(make: MakeRunner) -> None:
    runner = make(max_num_seqs=7, max_num_batched_tokens=100)
    for plan in largest_plans(7, 100, 30, 16):
        result = execute(runner, plan)
        assert len(result.token_ids) == len(result.logprobs) == plan.num_samples
        assert [len(part.entries) for part in result.prompt_logprobs] == [
            chunk.num_new - 1 for chunk in plan.chunks if chunk.num_new > 1
        ]
