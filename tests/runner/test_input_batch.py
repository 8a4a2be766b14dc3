"""Addressing: from lengths and block ids to positions, slots, block tables and sampled rows."""

from __future__ import annotations

import pytest
import torch

from nanoengine import SamplingParams
from nanoengine.engine.block_pool import NULL_BLOCK
from nanoengine.engine.messages import Phase, SamplingRow, ScheduledBatch
from nanoengine.runner.input_batch import InputBatch

CPU = torch.device("cpu")


def build(block_size: int, *seqs: tuple[int, int, list[int]], sampling: tuple[int, ...] = ()) -> InputBatch:
    """The tensors of a step; each sequence is (tokens in the cache, new tokens, block table)."""
    num_tokens = sum(new for _, new, _ in seqs)
    batch = ScheduledBatch(
        Phase.PREFILL,
        seq_ids=list(range(len(seqs))),
        token_ids=list(range(100, 100 + num_tokens)),
        num_computed_tokens=[computed for computed, _, _ in seqs],
        num_new_tokens=[new for _, new, _ in seqs],
        block_tables=[table for _, _, table in seqs],
        sampled_rows=list(sampling),
        sampling=[SamplingRow(SamplingParams(), 0, ()) for _ in sampling],
    )
    return InputBatch.build(batch, [], block_size, CPU)


def slots(inputs: InputBatch) -> list[int]:
    return inputs.metadata.slot_mapping.tolist()


def test_slots_of_a_sequence_with_blocks_of_4() -> None:
    assert slots(build(4, (0, 10, [7, 3, 9]))) == [28, 29, 30, 31, 12, 13, 14, 15, 36, 37]


def test_slots_of_a_chunk_in_the_middle_that_crosses_into_a_new_block() -> None:
    inputs = build(4, (6, 3, [7, 3, 9]))
    assert inputs.positions.tolist() == [6, 7, 8]
    assert slots(inputs) == [14, 15, 36]


def test_slot_of_one_decoded_token_with_blocks_of_16() -> None:
    inputs = build(16, (35, 1, [5, 2, 8, 12]))
    assert inputs.positions.tolist() == [35]
    assert slots(inputs) == [131]


def test_slots_with_blocks_of_256() -> None:
    assert slots(build(256, (0, 300, [5, 12]))) == [*range(1280, 1536), *range(3072, 3116)]


@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 256])
def test_slots_follow_the_formula_at_every_block_boundary(block_size: int) -> None:
    table = [9, 2, 7, 4, 11, 1]
    for computed in {0, block_size - 1, block_size, block_size + 1, 2 * block_size, 5 * block_size - 1}:
        count = 6 * block_size - computed
        expected = [table[p // block_size] * block_size + p % block_size for p in range(computed, computed + count)]
        assert slots(build(block_size, (computed, count, table))) == expected


def test_queries_of_several_sequences_lie_one_after_the_other() -> None:
    inputs = build(4, (0, 2, [1]), (4, 5, [2, 3, 4]), (7, 3, [5, 6, 7]))
    assert inputs.metadata.query_start_loc.tolist() == [0, 2, 7, 10]
    assert inputs.positions.tolist() == [0, 1, 4, 5, 6, 7, 8, 7, 8, 9]
    assert inputs.metadata.seq_lens.tolist() == [2, 9, 10]
    assert inputs.metadata.query_lens_list == [2, 5, 3]
    assert inputs.metadata.seq_lens_list == [2, 9, 10]
    assert inputs.input_ids.tolist() == list(range(100, 110))
    assert slots(inputs) == [4, 5, 12, 13, 14, 15, 16, 27, 28, 29]


def test_a_batch_with_equal_query_offsets_keeps_each_sequences_own_positions() -> None:
    computed = [30, 0, 8]
    inputs = build(16, (30, 2, [1, 2]), (0, 5, [3]), (8, 3, [4]))
    offsets = [0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
    owners = [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    assert inputs.positions.tolist() == [computed[i] + offset for i, offset in zip(owners, offsets, strict=True)]


def test_sampled_rows_are_the_last_tokens_of_the_sequences_that_sample() -> None:
    step = ((0, 2, [1]), (4, 5, [2, 3, 4]), (7, 3, [5, 6, 7]))
    assert build(4, *step, sampling=(0, 1, 2)).sampled_rows.tolist() == [1, 6, 9]
    assert build(4, *step, sampling=(1,)).sampled_rows.tolist() == [6]
    assert build(4, *step, sampling=(0, 2)).sampled_rows.tolist() == [1, 9]


def test_a_step_of_chunks_only_samples_nothing() -> None:
    sampled_rows = build(4, (0, 4, [1])).sampled_rows
    assert sampled_rows.shape == (0,)
    assert sampled_rows.dtype == torch.int64


def test_short_block_tables_are_filled_up_with_the_null_block() -> None:
    inputs = build(4, (0, 2, [1]), (4, 5, [2, 3, 4]), (7, 1, [5, 6]))
    assert inputs.metadata.block_tables.tolist() == [
        [1, NULL_BLOCK, NULL_BLOCK],
        [2, 3, 4],
        [5, 6, NULL_BLOCK],
    ]
    assert NULL_BLOCK == 0


def test_no_token_is_ever_written_to_the_null_block() -> None:
    inputs = build(4, (0, 4, [1, 2]), (0, 9, [3, 4, 5]))
    assert min(slots(inputs)) >= 4


def test_slots_of_large_pools_do_not_overflow_32_bits() -> None:
    block = 2**31 // 16 + 5
    assert slots(build(16, (0, 2, [block]))) == [block * 16, block * 16 + 1]


def test_tensors_have_the_dtypes_that_kernels_take() -> None:
    inputs = build(4, (0, 2, [1]))
    assert inputs.input_ids.dtype == inputs.positions.dtype == inputs.metadata.slot_mapping.dtype == torch.int64
    for values in (inputs.metadata.query_start_loc, inputs.metadata.seq_lens, inputs.metadata.block_tables):
        assert values.dtype == torch.int32
