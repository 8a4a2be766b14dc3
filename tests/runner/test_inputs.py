"""Addressing: from lengths and block ids to positions, slots, block tables and sampled tokens."""

from __future__ import annotations

from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.engine.kv.block_pool import NULL_BLOCK
from nanoengine.engine.messages import Chunk, StepPlan
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.runner.inputs import InputBatch, Layout, StepShape, pack, shape_of, unpack
from nanoengine.runner.rows import Rows
from tests.engine.toys import FAST
from tests.runner.fake_stream import FakeStream
from tests.runner.plans import decodes, start

NUM_ROWS, WIDTH = 9, 20
STREAM = FakeStream()  # its memory is full of garbage

Seq = tuple[int, int, list[int]]
"""Tokens in the cache, new tokens, block table."""


def plan_of(
    *seqs: Seq, sampling: tuple[int, ...] | None = None, num_decodes: int = 0, rows: list[int] | None = None
) -> StepPlan:
    """Sequences, begun where they stand, the last of them in row 0. The leading `num_decodes` are decodes, the rest chunks.

    The tokens of the chunks are 100, 101, and so on. `sampling` are the indices of those that sample; None: the decodes.
    """
    rows = list(range(len(seqs)))[::-1] if rows is None else rows
    runs = list(zip(rows, seqs, strict=True))
    numbers = iter(range(100, 100 + sum(new for _, new, _ in seqs[num_decodes:])))
    started = [start(row, [7] * (computed + 1), table) for row, (computed, _, table) in runs[:num_decodes]]
    chunks = []
    for i, (row, (computed, new, table)) in enumerate(runs[num_decodes:], num_decodes):
        tokens = [next(numbers) for _ in range(new)]
        started.append(start(row, [*[7] * computed, *tokens], table))
        chunks.append(Chunk(row, computed, new, (row,) * (i in (sampling or ()))))
    assert sampling is None or set(range(num_decodes)) <= set(sampling), "decodes sample"
    return StepPlan(
        started=started,
        decodes=decodes(*((row, computed) for row, (computed, _, _) in runs[:num_decodes])),
        chunks=chunks,
    )


def new_rows(plan: StepPlan, width: int = WIDTH) -> Rows:
    """Rows that have made the changes of a plan."""
    rows = Rows(NUM_ROWS, 1, width, STREAM)
    rows.apply(plan)
    return rows


def cache_of(rows: Rows) -> Any:
    """A cache with a layer for each group."""
    return SimpleNamespace(layers=[], groups=list(range(len(rows.tables))))


def tensors_of(plan: StepPlan, block_size: int, rows: Rows | None = None) -> InputBatch:
    rows = rows or new_rows(plan)
    packed = pack(plan, rows, STREAM)
    assert (packed.numbers.shape, packed.numbers.dtype) == ((packed.layout.size,), torch.int32)
    inputs = unpack(
        shape_of(plan, packed.layout, block_size), packed.numbers, rows, TorchKernels(), cache_of(rows), block_size
    )
    assert packed.sampled_rows.tolist() == inputs.sampled_rows.tolist(), "the sampler looks at them on the host"
    assert packed.sampled_positions.tolist() == inputs.sampled_positions.tolist()
    return inputs


def build(block_size: int, *seqs: Seq, sampling: tuple[int, ...] | None = None, num_decodes: int = 0) -> InputBatch:
    """The tensors of a step."""
    return tensors_of(plan_of(*seqs, sampling=sampling, num_decodes=num_decodes), block_size)


def slots(inputs: InputBatch) -> list[int]:
    return inputs.metadata[0].slot_mapping.tolist()


# ---- slots and positions


def test_slots_of_a_sequence_with_blocks_of_4() -> None:
    assert slots(build(4, (0, 10, [7, 3, 9]))) == [28, 29, 30, 31, 12, 13, 14, 15, 36, 37]


def test_slots_of_a_chunk_in_the_middle_that_crosses_into_a_new_block() -> None:
    inputs = build(4, (6, 3, [7, 3, 9]))
    assert inputs.positions.tolist() == [6, 7, 8]
    assert slots(inputs) == [14, 15, 36]


def test_slot_of_one_decoded_token_with_blocks_of_16() -> None:
    for num_decodes in (0, 1):
        inputs = build(16, (35, 1, [5, 2, 8, 12]), num_decodes=num_decodes)
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
    assert inputs.metadata[0].query_start_loc.tolist() == [0, 2, 7, 10]
    assert inputs.positions.tolist() == [0, 1, 4, 5, 6, 7, 8, 7, 8, 9]
    assert inputs.metadata[0].seq_lens.tolist() == [2, 9, 10]
    assert inputs.metadata[0].query_lens_list == [2, 5, 3]
    assert inputs.metadata[0].seq_lens_list == [2, 9, 10]
    assert inputs.input_ids.tolist() == list(range(100, 110))
    assert slots(inputs) == [4, 5, 12, 13, 14, 15, 16, 27, 28, 29]


def test_a_batch_with_equal_query_offsets_keeps_each_sequences_own_positions() -> None:
    computed = [30, 0, 8]
    inputs = build(16, (30, 2, [1, 2]), (0, 5, [3]), (8, 3, [4]))
    offsets = [0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
    owners = [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    assert inputs.positions.tolist() == [computed[i] + offset for i, offset in zip(owners, offsets, strict=True)]


def test_no_token_is_ever_written_to_the_null_block() -> None:
    inputs = build(4, (0, 4, [1, 2]), (0, 9, [3, 4, 5]))
    assert min(slots(inputs)) >= 4


def test_slots_of_large_pools_do_not_overflow_32_bits() -> None:
    block = 2**31 // 16 + 5
    assert slots(build(16, (0, 2, [block]))) == [block * 16, block * 16 + 1]
    assert slots(build(16, (1, 1, [block]), num_decodes=1)) == [block * 16 + 1]


# ---- sampling


def test_sampled_tokens_are_the_last_ones_of_the_sequences_that_sample() -> None:
    step = ((0, 2, [1]), (4, 5, [2, 3, 4]), (7, 3, [5, 6, 7]))
    for sampling, tokens, rows, positions in (
        ((0, 1, 2), [1, 6, 9], [2, 1, 0], [2, 9, 10]),
        ((1,), [6], [1], [9]),
        ((0, 2), [1, 9], [2, 0], [2, 10]),
    ):
        inputs = build(4, *step, sampling=sampling)
        assert inputs.sampled_tokens.tolist() == tokens
        assert inputs.sampled_rows.tolist() == rows
        assert inputs.sampled_positions.tolist() == positions, "where the new token will stand"


def test_a_prompt_that_forks_samples_one_token_for_each_row() -> None:
    plan = plan_of((4, 1, [8, 9]), (0, 2, [1]), (4, 5, [2, 3, 4]), sampling=(0, 1, 2), num_decodes=1)
    plan.chunks[0] = plan.chunks[0]._replace(samples=(1, 7, 5))
    inputs = tensors_of(plan, 4)
    assert inputs.sampled_tokens.tolist() == [0, 2, 2, 2, 7]
    assert inputs.sampled_rows.tolist() == [2, 1, 7, 5, 0]
    assert inputs.sampled_positions.tolist() == [5, 2, 2, 2, 9]


def test_a_step_of_chunks_only_samples_nothing() -> None:
    inputs = build(4, (0, 4, [1]))
    assert inputs.sampled_tokens.shape == inputs.sampled_rows.shape == inputs.sampled_positions.shape == (0,)


# ---- what the device keeps


def test_short_block_tables_are_filled_up_with_the_null_block() -> None:
    inputs = build(4, (0, 2, [1]), (4, 5, [2, 3, 4]), (7, 1, [5, 6]))
    assert inputs.metadata[0].block_tables.tolist() == [
        [1, NULL_BLOCK, NULL_BLOCK],
        [2, 3, 4],
        [5, 6, NULL_BLOCK],
    ]
    assert NULL_BLOCK == 0


def test_block_tables_are_as_wide_as_the_longest_sequence_of_the_step() -> None:
    """A table may have blocks for tokens to come."""
    inputs = build(4, (0, 2, [1, 8, 9]), (4, 4, [2, 3, 4, 5]))
    assert inputs.metadata[0].block_tables.tolist() == [[1, 8], [2, 3]]


def test_a_decode_computes_the_last_token_of_its_row() -> None:
    plan = plan_of((3, 1, [1]), (8, 1, [2, 3, 4]), (7, 1, [5, 6]), num_decodes=3, rows=[4, 0, 7])
    rows = new_rows(plan)
    rows.last_tokens[:] = torch.arange(300, 310)
    assert tensors_of(plan, 4, rows).input_ids.tolist() == [304, 300, 307]
    packed = pack(plan, rows, STREAM)
    rows.last_tokens[7] = 9  # before the step is unpacked, not when it is packed
    inputs = unpack(shape_of(plan, packed.layout, 4), packed.numbers, rows, TorchKernels(), cache_of(rows), 4)
    assert inputs.input_ids.tolist() == [304, 300, 9]


def test_a_chunk_computes_the_tokens_that_its_row_was_started_with() -> None:
    """Whatever was sampled into the row since then."""
    first = plan_of((0, 3, [1]), (0, 9, [2, 3, 4]))
    rows = new_rows(first)
    rows.last_tokens[:] = torch.arange(300, 310)
    later = StepPlan(chunks=[Chunk(0, 2, 4, ()), Chunk(1, 1, 2, ())])
    assert tensors_of(later, 4, rows).input_ids.tolist() == [105, 106, 107, 108, 101, 102]


def test_decodes_come_first_and_sample_first() -> None:
    plan = plan_of((3, 1, [1]), (8, 1, [2, 3, 4]), (2, 5, [5, 6]), (0, 1, [7]), num_decodes=2, sampling=(0, 1, 2))
    rows = new_rows(plan)
    rows.last_tokens[:] = torch.arange(300, 310)
    inputs = tensors_of(plan, 4, rows)
    assert inputs.input_ids.tolist() == [303, 302, 100, 101, 102, 103, 104, 105]
    assert inputs.positions.tolist() == [3, 8, 2, 3, 4, 5, 6, 0]
    assert slots(inputs) == [7, 16, 22, 23, 24, 25, 26, 28]
    assert inputs.metadata[0].num_decodes == 2
    assert inputs.metadata[0].query_start_loc.tolist() == [0, 1, 2, 7, 8]
    assert inputs.metadata[0].query_lens_list == [1, 1, 5, 1]
    assert inputs.metadata[0].seq_lens.tolist() == inputs.metadata[0].seq_lens_list == [4, 9, 7, 1]
    assert inputs.sampled_tokens.tolist() == [0, 1, 6]
    assert inputs.sampled_rows.tolist() == [3, 2, 1]
    assert inputs.sampled_positions.tolist() == [4, 9, 7]


def test_what_was_packed_is_nobody_elses() -> None:
    plan = plan_of((8, 1, [1, 2, 3]), (0, 2, [1]), (4, 5, [2, 3, 4]), num_decodes=1, sampling=(0, 2))
    rows = new_rows(plan)
    packed = pack(plan, rows, STREAM)
    assert packed.layout == Layout(3, 8, 2)
    before = packed.numbers.clone()
    plan.decodes.rows[:] = plan.decodes.num_computed[:] = 77
    rows.token_ids.clear()
    assert torch.equal(packed.numbers, before)
    assert pack(StepPlan(), rows, STREAM, 3).numbers.data_ptr() != packed.numbers.data_ptr()


# ---- decode steps that are filled up


def filled(plan: StepPlan, size: int, block_size: int = 4) -> InputBatch:
    """A plan of decodes in the tensors of a step of `size` sequences."""
    rows = new_rows(plan)
    rows.last_tokens[:] = torch.arange(300, 310)
    packed = pack(plan, rows, STREAM, size)
    assert packed.layout == Layout.of_decodes(size)
    assert packed.sampled_rows.tolist() == plan.decodes.rows.tolist(), "of the plan's own samples alone"
    assert packed.sampled_positions.tolist() == (plan.decodes.num_computed + 1).tolist()
    shape = StepShape(packed.layout, size, [1] * size, [WIDTH * block_size] * size, WIDTH)
    return unpack(shape, packed.numbers, rows, TorchKernels(), cache_of(rows), block_size)


@pytest.mark.parametrize("size", [3, 4, 5, 8, 13])
def test_padding_has_no_slot_and_no_length(size: int) -> None:
    plan = plan_of((3, 1, [1]), (8, 1, [2, 3, 4]), (7, 1, [5, 6]), num_decodes=3)
    inputs, more = filled(plan, size), size - 3
    assert inputs.input_ids.tolist() == [302, 301, 300] + [0] * more
    assert inputs.positions.tolist() == [3, 8, 7] + [0] * more
    assert slots(inputs) == [7, 16, 27] + [-1] * more
    assert inputs.metadata[0].seq_lens.tolist() == [4, 9, 8] + [0] * more
    assert inputs.metadata[0].query_start_loc.tolist() == list(range(size + 1))
    assert inputs.metadata[0].block_tables[:, :4].tolist() == [
        [1, 0, 0, 0],
        [2, 3, 4, 0],
        [5, 6, 0, 0],
        *[[NULL_BLOCK] * 4] * more,
    ]
    assert inputs.metadata[0].block_tables.shape == (size, WIDTH)
    assert inputs.metadata[0].num_decodes == size
    assert inputs.sampled_tokens.tolist() == list(range(size))
    assert inputs.sampled_rows.tolist() == [2, 1, 0] + [NUM_ROWS] * more
    assert inputs.sampled_positions.tolist() == [4, 9, 8] + [0] * more


def test_a_step_may_be_all_padding() -> None:
    inputs = filled(StepPlan(), 5)
    assert slots(inputs) == [-1] * 5
    assert inputs.metadata[0].seq_lens.tolist() == [0] * 5
    assert inputs.sampled_rows.tolist() == [NUM_ROWS] * 5
    assert inputs.input_ids.tolist() == [0] * 5
    assert inputs.positions.tolist() == [0] * 5


# ---- layout and shape


def test_the_sections_of_a_layout_follow_one_another_at_multiples_of_16_bytes() -> None:
    layout = Layout(5, 9, 2)
    assert [(section.start, section.stop) for section in layout.sections] == [
        (0, 5), (8, 13), (16, 22), (24, 33), (36, 38), (40, 42), (44, 46),
    ]  # fmt: skip
    assert layout.size == 48
    assert Layout.of_decodes(3) == Layout(3, 3, 3)


@FAST
@given(st.integers(1, 600), st.integers(1, 9000), st.integers(0, 600))
def test_sections_never_overlap_and_waste_little(num_seqs: int, num_tokens: int, num_samples: int) -> None:
    layout = Layout(num_seqs, num_tokens, num_samples)
    sizes = (num_seqs, num_seqs, num_seqs + 1, num_tokens, *[num_samples] * 3)
    end = 0
    for section, size in zip(layout.sections, sizes, strict=True):
        assert section.stop - section.start == size
        assert section.start % 4 == 0
        assert 0 <= section.start - end < 4
        end = section.stop
    assert 0 <= layout.size - end < 4
    for more in (layout._replace(num_seqs=num_seqs + 1), layout._replace(num_tokens=num_tokens + 1)):
        assert more.size >= layout.size  # so the largest of each has room for all


def test_a_shape_is_what_the_host_knows() -> None:
    plan = plan_of((0, 2, [1]), (4, 5, [2, 3, 4]), (7, 3, [5, 6, 7]))
    layout = pack(plan, new_rows(plan), STREAM).layout
    assert shape_of(plan, layout, 4) == StepShape(Layout(3, 10, 0), 0, [2, 5, 3], [2, 9, 10], 3)
    assert shape_of(plan, layout, 10).num_blocks == 1
    assert shape_of(plan, layout, 3).num_blocks == 4
    mixed = plan_of((9, 1, [1, 2, 3]), (4, 5, [4, 5, 6]), num_decodes=1)
    layout = pack(mixed, new_rows(mixed), STREAM).layout
    assert shape_of(mixed, layout, 4) == StepShape(Layout(2, 6, 1), 1, [1, 5], [10, 9], 3)


def test_tensors_have_the_dtypes_that_kernels_take() -> None:
    steps = (
        build(4, (0, 2, [1]), sampling=(0,)),
        build(4, (2, 1, [1]), num_decodes=1),
        build(4, (2, 1, [1]), (0, 2, [2]), num_decodes=1, sampling=(0, 1)),
    )
    for inputs in steps:
        assert inputs.input_ids.dtype == inputs.positions.dtype == inputs.metadata[0].slot_mapping.dtype == torch.int64
        for values in (
            inputs.metadata[0].query_start_loc,
            inputs.metadata[0].seq_lens,
            inputs.metadata[0].block_tables,
        ):
            assert values.dtype == torch.int32
        for values in (inputs.sampled_tokens, inputs.sampled_rows, inputs.sampled_positions):
            assert values.dtype == torch.int32


# ---- any step


@FAST
@given(
    seqs=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=NUM_ROWS),
    block_size=st.sampled_from([2, 4, 16]),
    data=st.data(),
)
def test_any_step_is_packed_and_unpacked(seqs: list[tuple[int, int]], block_size: int, data: st.DataObject) -> None:
    num_decodes = data.draw(st.integers(0, len(seqs)))
    seqs = [(computed, 1 if i < num_decodes else new) for i, (computed, new) in enumerate(seqs)]
    tables = [list(range(1 + 30 * i, 1 + 30 * i - (-(a + b) // block_size))) for i, (a, b) in enumerate(seqs)]
    sampling = [i for i in range(len(seqs)) if i < num_decodes or data.draw(st.booleans())]
    plan = plan_of(
        *((*seq, table) for seq, table in zip(seqs, tables, strict=True)),
        sampling=tuple(sampling),
        num_decodes=num_decodes,
        rows=data.draw(st.permutations(range(NUM_ROWS)))[: len(seqs)],
    )
    rows = new_rows(plan, width=30)
    rows.last_tokens[:] = torch.arange(300, 310)
    inputs = tensors_of(plan, block_size, rows)
    starts = [0, *accumulate(new for _, new in seqs)]
    assert inputs.metadata[0].query_start_loc.tolist() == starts
    for i, (first, end) in enumerate(pairwise(starts)):
        computed, new = seqs[i]
        positions = list(range(computed, computed + new))
        assert inputs.positions[first:end].tolist() == positions
        assert slots(inputs)[first:end] == [
            tables[i][position // block_size] * block_size + position % block_size for position in positions
        ]
        assert inputs.metadata[0].block_tables[i, : len(tables[i])].tolist() == tables[i]
    assert inputs.input_ids.tolist() == [
        *(300 + row for row in plan.decodes.rows.tolist()),
        *range(100, 100 + starts[-1] - num_decodes),
    ]
    assert inputs.metadata[0].num_decodes == num_decodes
    assert inputs.metadata[0].seq_lens.tolist() == inputs.metadata[0].seq_lens_list == [sum(seq) for seq in seqs]
    assert inputs.sampled_tokens.tolist() == [starts[i + 1] - 1 for i in sampling]
    assert inputs.sampled_positions.tolist() == [sum(seqs[i]) for i in sampling]
