"""InputBatch: the tensors of one step, made from a ScheduledBatch.

The host packs the numbers of a step into one piece of memory and sends them in one copy. Everything else is worked out on the
device, from them and from the rows that it keeps: positions, slots, block tables, and tokens that the host has not seen yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from nanoengine.attention.backend import AttentionMetadata, KVLayer
from nanoengine.engine.messages import Phase, ScheduledBatch
from nanoengine.kernels.interface import Kernels
from nanoengine.runner.rows import Rows
from nanoengine.runner.stream import Stream

ALIGNED = 4
"""Numbers in 16 bytes."""


class Layout(NamedTuple):
    """Where the numbers of a step lie: those of `num_seqs` sequences, `num_tokens` tokens and `num_samples` samples.

    A decode step has one of each per sequence, so its layout follows from its size alone; a CUDA graph relies on that.
    """

    num_seqs: int
    num_tokens: int
    num_samples: int

    @property
    def sections(self) -> tuple[slice, ...]:
        """Of rows, computed tokens, starts, token ids, sampled tokens, sampled rows and sampled positions, in this order."""
        return _sections(self)

    @property
    def size(self) -> int:
        return -(-self.sections[-1].stop // ALIGNED) * ALIGNED

    @classmethod
    def of_decode(cls, num_seqs: int) -> Layout:
        return cls(num_seqs, num_seqs, num_seqs)


@lru_cache(maxsize=4096)
def _sections(layout: Layout) -> tuple[slice, ...]:
    """Each begins at a multiple of 16 bytes, as kernels are compiled for."""
    seqs, tokens, samples = layout
    sections, start = [], 0
    for size in (seqs, seqs, seqs + 1, tokens, samples, samples, samples):
        sections.append(slice(start, start + size))
        start += -(-size // ALIGNED) * ALIGNED
    return tuple(sections)


@dataclass
class Shape:
    """What the host knows of a step without looking at the device."""

    layout: Layout
    phase: Phase
    query_lens: list[int]
    seq_lens: list[int]  # with the new tokens; an upper bound will do
    num_blocks: int  # columns of the block tables that are read


@dataclass
class InputBatch:
    """What the model's forward pass takes, and whose rows are sampled into which."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    metadata: AttentionMetadata
    sampled_tokens: Tensor  # [num_samples] int32: indices into the tokens of the step
    sampled_into: Tensor  # [num_samples] int32: rows of `Rows`
    sampled_positions: Tensor  # [num_samples] int32: where each sampled token will stand in its sequence


def pack(batch: ScheduledBatch, rows: Rows, stream: Stream, size: int | None = None) -> tuple[Layout, Tensor]:
    """The numbers of a step in host memory: [layout.size] int32.

    Args:
        size: fill a decode batch up to so many sequences, with ones that are nobody's.
    """
    count = len(batch)
    layout = Layout(size or count, size or len(batch.token_ids), size or len(batch.sampling))
    padding = layout.num_seqs - count
    computed, new, sampled = batch.num_computed_tokens, batch.num_new_tokens, batch.sampled_rows
    ends = list(accumulate(new))
    nobody, zeros, on = [rows.nobody] * padding, [0] * padding, range(count, count + padding)
    host = stream.host_tensor(layout.size, torch.int32)
    numbers = host.numpy()
    for section, values in zip(
        layout.sections,
        (
            [*batch.rows, *nobody],
            [*computed, *zeros],
            [0, *ends, *(i + 1 for i in on)],
            [*batch.token_ids, *zeros],
            [*(ends[i] - 1 for i in sampled), *on],
            [*batch.sampled_into, *nobody],
            [*(computed[i] + new[i] for i in sampled), *zeros],
        ),
        strict=True,
    ):
        numbers[section] = values
    return layout, host


def shape_of(batch: ScheduledBatch, layout: Layout, block_size: int) -> Shape:
    """What the host knows of a batch that is not filled up."""
    seq_lens = [start + count for start, count in zip(batch.num_computed_tokens, batch.num_new_tokens, strict=True)]
    return Shape(layout, batch.phase, batch.num_new_tokens, seq_lens, -(-max(seq_lens) // block_size))


def unpack(
    shape: Shape, numbers: Tensor, rows: Rows, kernels: Kernels, kv_cache: list[KVLayer], block_size: int
) -> InputBatch:
    """The tensors of a step, on the device.

    Args:
        numbers: what `pack` packed, copied there.
    """
    parts = (numbers[section] for section in shape.layout.sections)
    row, computed, starts, token_ids, sampled_tokens, sampled_into, positions = parts
    placed = kernels.place_tokens(
        token_ids, row, starts, computed, rows.newest, rows.tables, block_size, max(shape.query_lens)
    )
    metadata = AttentionMetadata(
        phase=shape.phase,
        kv_cache=kv_cache,
        query_start_loc=starts,
        seq_lens=placed.seq_lens,
        block_tables=rows.tables[:, : shape.num_blocks].index_select(0, row),
        slot_mapping=placed.slot_mapping,
        query_lens_list=shape.query_lens,
        seq_lens_list=shape.seq_lens,
    )
    return InputBatch(placed.input_ids, placed.positions, metadata, sampled_tokens, sampled_into, positions)
