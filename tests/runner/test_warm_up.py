"""The warm-up's batches: as large as a step may be, and such as the runner can compute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nanoengine.engine.messages import Phase, ScheduledBatch
from nanoengine.runner.warm_up import largest_batches

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


def check_shape(batch: ScheduledBatch, max_num_seqs: int, max_len: int, block_size: int) -> None:
    """What every batch of a scheduler fulfils."""
    columns = (batch.seq_ids, batch.rows, batch.num_computed_tokens, batch.num_new_tokens, batch.block_tables)
    assert {len(column) for column in columns} == {len(batch)}
    assert len({len(column) for column in (batch.sampled_rows, batch.sampled_into, batch.sampling)}) == 1
    assert len(set(batch.rows)) == len(batch) <= max_num_seqs
    assert all(0 <= row < max_num_seqs for row in batch.rows)
    assert sum(batch.num_new_tokens) == len(batch.token_ids)
    for computed, new, table in zip(batch.num_computed_tokens, batch.num_new_tokens, batch.block_tables, strict=True):
        assert computed >= 0
        assert new >= 1
        assert computed + new <= min(max_len, len(table) * block_size)
        assert 0 not in table, "the null block is never written"
        assert len(set(table)) == len(table)


def test_prefills_fill_the_token_budget_or_all_sequences(case: tuple[int, ...]) -> None:
    max_num_seqs, budget, max_len, block_size = case
    long, short, _ = largest_batches(max_num_seqs, budget, max_len, block_size)
    for prefill in (long, short):
        assert prefill.phase is Phase.PREFILL
        assert sum(prefill.num_new_tokens) == min(budget, max_num_seqs * max_len)
        check_shape(prefill, max_num_seqs, max_len, block_size)
    assert max(long.num_new_tokens) == min(budget, max_len)
    assert len(short) == min(max_num_seqs, budget)


def test_the_decode_is_of_as_many_sequences_as_may_run(case: tuple[int, ...]) -> None:
    max_num_seqs, budget, max_len, block_size = case
    *_, decode = largest_batches(max_num_seqs, budget, max_len, block_size)
    assert decode.phase is Phase.DECODE
    assert len(decode) == min(max_num_seqs, budget)
    assert set(decode.num_new_tokens) == {1}
    check_shape(decode, max_num_seqs, max_len, block_size)


def test_every_row_is_sampled_the_costly_way(case: tuple[int, ...]) -> None:
    """A greedy step would need less memory than one with filters, and log probabilities need most."""
    for batch in largest_batches(*case):
        assert batch.sampled_rows == list(range(len(batch)))
        assert batch.sampled_into == batch.rows
        for row in batch.sampling:
            assert row.params.temperature > 0
            assert row.params.top_k > 0
            assert row.params.top_p < 1
            assert row.params.logprobs


def test_sequences_share_one_block_table(case: tuple[int, ...]) -> None:
    """So that the warm-up needs a cache of one sequence, before it is known how large a cache may be."""
    _, budget, max_len, block_size = case
    tables = [table for batch in largest_batches(*case) for table in batch.block_tables]
    assert all(table == tables[0] for table in tables)
    assert len(tables[0]) == -(-min(budget, max_len) // block_size)
