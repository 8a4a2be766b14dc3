"""The tensors of a step are what its plan says, worked out slowly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.core.device import Device
from nanoengine.core.inputs import Rows, pack, unpack
from nanoengine.core.kernels import CoreKernels
from nanoengine.core.messages import Entries, RowSampling, Run, Started, StepPlan
from nanoengine.core.sampling_params import CoreSamplingParams
from tests.drawn import FAST

NUM_ROWS, NUM_GROUPS, WIDTH, SIZE = 6, 2, 8, 4
SAMPLING = RowSampling(CoreSamplingParams(), 0, 1)


@FAST
@given(st.data())
def test_every_token_of_a_step_is_where_its_plan_says(data: st.DataObject) -> None:
    rows, tables = Rows(NUM_ROWS, NUM_GROUPS, WIDTH, Device(torch.device("cpu"))), {}
    order = data.draw(st.permutations(range(NUM_ROWS)))
    known: dict[int, list[int]] = {row: [100 * row + i for i in range(WIDTH * SIZE)] for row in order}
    blocks = iter(range(1, 1000))
    for group in range(NUM_GROUPS):
        tables |= {(row, group): [next(blocks) for _ in range(WIDTH)] for row in order}
    begun = [
        Started(row, known[row], [tables[row, g][: row + 1] for g in range(NUM_GROUPS)], SAMPLING) for row in order
    ]
    rows.apply(StepPlan(started=begun))
    assert rows.last_tokens.tolist()[:-1] == [known[row][-1] for row in range(NUM_ROWS)]
    rows.last_tokens[:] = torch.arange(NUM_ROWS + 1) + 1000  # as sampling writes them
    # The rest of each table comes later.
    later = [
        Entries(row, group, row + 1, tables[row, group][row + 1 :]) for row in order for group in range(NUM_GROUPS)
    ]

    starts = st.integers(0, WIDTH * SIZE - 6)
    kinds = data.draw(
        st.lists(st.sampled_from(["decode", "drafts", "chunk", "last chunk"]), min_size=1, max_size=NUM_ROWS)
    )
    kinds.sort(key=["decode", "drafts", "chunk", "last chunk"].index)
    decodes, runs = [], []
    for row, kind in zip(order, kinds, strict=False):
        start, count = data.draw(starts), data.draw(st.integers(2, 6))
        if kind == "decode":
            decodes.append((row, start))
        elif kind == "drafts":
            runs.append(Run(row, start, count, True, tuple(range(2000, 2000 + count - 1))))
        else:
            runs.append(Run(row, start, count, kind == "last chunk"))
    plan = StepPlan(
        tables=later,
        decode_rows=np.array([row for row, _ in decodes], np.int32),
        decode_starts=np.array([start for _, start in decodes], np.int32),
        runs=runs,
    )
    rows.apply(plan)
    packed = pack(plan, rows)
    layers: Any = SimpleNamespace(layers=["a", "b", "c"], groups=[0, 1, 0])
    batch = unpack(packed, packed.numbers, rows, CoreKernels(), layers, SIZE)

    tokens: list[tuple[int, int, int]] = []  # (row, token, position)
    samples: list[tuple[int, int, int]] = []  # (place in the step, row, position of what is sampled)
    for run in [*(Run(row, start, 1, True) for row, start in decodes), *runs]:
        first = len(tokens)
        is_decode = bool(run.drafts) or first < len(decodes)
        own = [1000 + run.row, *run.drafts] if is_decode else known[run.row][run.start : run.start + run.num_new]
        tokens += [(run.row, token, position) for position, token in enumerate(own, run.start)]
        sampling = range(run.num_new) if is_decode else range(run.num_new)[-1:] if run.samples else ()
        samples += [(first + i, run.row, run.start + i + 1) for i in sampling]
    assert batch.input_ids.tolist() == [token for _, token, _ in tokens]
    assert batch.positions.tolist() == [position for _, _, position in tokens]
    found = [batch.sampled_tokens.tolist(), *(packed.numbers[part].tolist() for part in packed.sections[-2:])]
    assert list(zip(*found, strict=True)) == samples
    assert [part.tolist() for part in packed.sampled] == found[1:]
    for layer, group in enumerate(layers.groups):
        metadata = batch.metadata[layer]
        assert metadata.slot_mapping.tolist() == [
            tables[row, group][position // SIZE] * SIZE + position % SIZE for row, _, position in tokens
        ]
        assert metadata.num_decodes == sum(kind in ("decode", "drafts") for kind in kinds[: len(order)])
        assert metadata.seq_lens.tolist() == metadata.seq_lens_list
        for place, (run_len, seq_len) in enumerate(zip(metadata.query_lens_list, metadata.seq_lens_list, strict=True)):
            row = tokens[sum(metadata.query_lens_list[:place])][0]
            assert metadata.query_start_loc[place + 1] - metadata.query_start_loc[place] == run_len
            num_blocks = -(-seq_len // SIZE)
            assert metadata.block_tables[place, :num_blocks].tolist() == tables[row, group][:num_blocks]
