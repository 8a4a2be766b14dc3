"""The tensors of one step, made from a StepPlan.

The host packs the numbers of a step into one piece of memory and sends them in one copy. Everything else is worked out on the
device, from them and from the rows that it keeps: positions, slots, block tables, and tokens that the host has not seen yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.attention import AttentionMetadata
from nanoengine.engine.messages import UNKNOWN, Chunk, Drafted, StepPlan
from nanoengine.kernels.interface import Kernels
from nanoengine.runner.kv_cache import KVCache
from nanoengine.runner.rows import Rows
from nanoengine.runner.stream import Stream

ALIGNED = 4
"""Numbers in 16 bytes."""


class Layout(NamedTuple):
    """Where the numbers of a step lie: those of `num_seqs` runs, `num_tokens` tokens and `num_samples` samples.

    A step of decodes without drafts has one of each per run, so its layout follows from its size, as that of a prompt alone; CUDA
    graphs rely on that.
    """

    num_seqs: int
    num_tokens: int
    num_samples: int

    @property
    def sections(self) -> tuple[slice, ...]:
        """Of rows, computed tokens, starts, token ids, sampled tokens, sampled rows and sampled positions, in this order.

        Each begins at a multiple of 16 bytes, as kernels are compiled for.
        """
        seqs, tokens, samples = self
        sections, start = [], 0
        for size in (seqs, seqs, seqs + 1, tokens, samples, samples, samples):
            sections.append(slice(start, start + size))
            start += -(-size // ALIGNED) * ALIGNED
        return tuple(sections)

    @property
    def size(self) -> int:
        return -(-self.sections[-1].stop // ALIGNED) * ALIGNED

    @classmethod
    def of_decodes(cls, num_seqs: int) -> Layout:
        return cls(num_seqs, num_seqs, num_seqs)

    @classmethod
    def of_drafted(cls, num_seqs: int, num_tokens: int) -> Layout:
        """Of runs with up to so many tokens each, one behind the other, and a run of padding for what they leave."""
        return cls(num_seqs + 1, num_seqs * num_tokens, num_seqs * num_tokens)

    @classmethod
    def of_prompt(cls, num_tokens: int) -> Layout:
        """Of one chunk and a run of padding, which have so many tokens together."""
        return cls(2, num_tokens, 1)


@dataclass
class StepShape:
    """What the host knows of a step without looking at the device."""

    layout: Layout
    num_decodes: int  # runs of one token, or a few with drafts, before all others
    query_lens: list[int]
    seq_lens: list[int]  # with the new tokens; an upper bound will do
    num_blocks: int  # columns of the block tables that are read
    num_common_blocks: list[int] = field(default_factory=list)  # of each group: as in the plan
    longest_run: int | None = None  # tokens of a run of padding, if it is longer than all others


@dataclass
class Packed:
    """The numbers of a step in host memory, and those that the sampler looks at there."""

    layout: Layout
    numbers: Tensor  # [layout.size] int32
    sampled_rows: np.ndarray  # [samples of the plan] int32
    sampled_positions: np.ndarray  # the same


@dataclass
class InputBatch:
    """What the model's forward pass takes, and what is sampled into which rows."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    metadata: list[AttentionMetadata]  # of each layer; layers of one KV group share it
    sampled_tokens: Tensor  # [num_samples] int32: indices into the tokens of the step
    sampled_rows: Tensor  # [num_samples] int32: rows of `Rows`
    sampled_positions: Tensor  # [num_samples] int32: where each sampled token will stand in its sequence


def pack(plan: StepPlan, rows: Rows, stream: Stream, size: int | None = None) -> Packed:
    """The numbers of a step.

    Args:
        size: fill a step of decodes without drafts up to so many runs, with padding.
    """
    decodes, drafted, chunks = plan.decodes, plan.drafted, plan.chunks
    count, samples = len(decodes.rows), plan.num_samples
    num_runs = count + len(drafted) + len(chunks)
    layout = Layout(size or num_runs, size or plan.num_new_tokens, size or samples)
    host = stream.host_tensor(layout.size, torch.int32)
    numbers = host.numpy()
    row, computed, starts, token_ids, sampled_tokens, sampled_rows, positions = (numbers[s] for s in layout.sections)
    row[:count] = sampled_rows[:count] = decodes.rows
    computed[:count] = decodes.num_computed
    positions[:count] = decodes.num_computed + 1
    token_ids[:count] = UNKNOWN
    starts[:] = np.arange(len(starts))
    sampled_tokens[:] = np.arange(len(sampled_tokens))
    if drafted or chunks:
        after = _pack_drafted(drafted, count, row, computed, starts, token_ids, sampled_rows, positions)
        behind = [section[count + len(drafted) :] for section in (row, computed, starts)]
        _pack_chunks(
            chunks, rows, after, *behind, *(s[after:] for s in (token_ids, sampled_tokens, sampled_rows, positions))
        )
    elif size is not None:
        row[count:] = sampled_rows[count:] = rows.padding_row
        for padded in (computed, token_ids, positions):
            padded[count:] = 0
    return Packed(layout, host, sampled_rows[:samples], positions[:samples])


def pack_drafted(plan: StepPlan, rows: Rows, stream: Stream, size: tuple[int, int]) -> Packed:
    """The numbers of a step of decodes, some with drafts, filled up to `size`, (runs, tokens of each), by a run of padding.

    A plan of nothing is all padding.
    """
    own, layout = pack(plan, rows, stream), Layout.of_drafted(*size)
    host = stream.host_tensor(layout.size, torch.int32)
    numbers = host.numpy()
    numbers[:] = 0
    sections = [numbers[section] for section in layout.sections]
    row, _, starts, _, sampled_tokens, sampled_rows, positions = sections
    row[:] = sampled_rows[:] = rows.padding_row
    for to, section in zip(sections, own.layout.sections, strict=True):
        to[: section.stop - section.start] = own.numbers.numpy()[section]
    count = own.layout.num_seqs
    starts[count:-1], starts[-1] = own.layout.num_tokens, layout.num_tokens
    sampled_tokens[:] = np.arange(len(sampled_tokens))
    return Packed(layout, host, sampled_rows[: plan.num_samples], positions[: plan.num_samples])


def pack_prompt(plan: StepPlan, rows: Rows, stream: Stream, size: int) -> Packed:
    """The numbers of a step of one chunk alone, which samples at most once, filled up to `size` tokens by a run of padding.

    A plan of nothing is all padding.
    """
    layout = Layout.of_prompt(size)
    host = stream.host_tensor(layout.size, torch.int32)
    numbers = host.numpy()
    numbers[:] = 0
    row, computed, starts, token_ids, sampled_tokens, sampled_rows, positions = (numbers[s] for s in layout.sections)
    row[:] = sampled_rows[:] = rows.padding_row
    starts[2] = size
    for chunk in plan.chunks:
        start, end = chunk.num_computed, chunk.num_computed + chunk.num_new
        row[0], computed[0], starts[1] = chunk.row, start, chunk.num_new
        token_ids[: chunk.num_new] = rows.token_ids[chunk.row][start:end]
        sampled_tokens[0], positions[0] = chunk.num_new - 1, end
        sampled_rows[: len(chunk.samples)] = chunk.samples
    return Packed(layout, host, sampled_rows[: plan.num_samples], positions[: plan.num_samples])


def _pack_drafted(drafted: Sequence[Drafted], count: int, *sections: np.ndarray) -> int:
    """The numbers of runs with drafts, behind those of `count` decodes; returns how many tokens there are then."""
    row, computed, starts, token_ids, sampled_rows, positions = sections
    first = count
    for number, run in enumerate(drafted, start=count):
        end = first + run.num_new
        row[number], computed[number], starts[number] = run.row, run.num_computed, first
        token_ids[first], token_ids[first + 1 : end] = UNKNOWN, run.drafts
        sampled_rows[first:end] = run.row
        positions[first:end] = np.arange(run.num_computed + 1, run.num_computed + 1 + run.num_new)
        first = end
    return first


def _pack_chunks(chunks: Sequence[Chunk], rows: Rows, first: int, *sections: np.ndarray) -> None:
    """The numbers of the chunks, of which the first token is the one of number `first`; sections begin with them."""
    row, computed, starts, token_ids, sampled_tokens, sampled_rows, positions = sections
    row[:] = [chunk.row for chunk in chunks]
    computed[:] = [chunk.num_computed for chunk in chunks]
    ends = list(accumulate((chunk.num_new for chunk in chunks), initial=first))
    starts[:] = ends
    token_ids[:] = [
        token
        for chunk in chunks
        for token in rows.token_ids[chunk.row][chunk.num_computed : chunk.num_computed + chunk.num_new]
    ]
    pairs = [(target, end, chunk) for end, chunk in zip(ends[1:], chunks, strict=True) for target in chunk.samples]
    sampled_tokens[:] = [end - 1 for _, end, _ in pairs]
    sampled_rows[:] = [target for target, _, _ in pairs]
    positions[:] = [chunk.num_computed + chunk.num_new for _, _, chunk in pairs]


def shape_of(plan: StepPlan, layout: Layout, block_size: int) -> StepShape:
    """What the host knows of a plan that is not filled up."""
    runs: list[Drafted | Chunk] = [*plan.drafted, *plan.chunks]
    count = len(plan.decodes.rows)
    seq_lens = (plan.decodes.num_computed + 1).tolist() + [run.num_computed + run.num_new for run in runs]
    query_lens = [1] * count + [run.num_new for run in runs]
    num_blocks = -(-max(seq_lens) // block_size)
    return StepShape(layout, count + len(plan.drafted), query_lens, seq_lens, num_blocks, plan.num_common_blocks)


def unpack(
    shape: StepShape, numbers: Tensor, rows: Rows, kernels: Kernels, kv_cache: KVCache, block_size: int
) -> InputBatch:
    """The tensors of a step, on the device.

    Args:
        numbers: what `pack` packed, copied there.
    """
    parts = (numbers[section] for section in shape.layout.sections)
    row, computed, starts, token_ids, sampled_tokens, sampled_rows, positions = parts
    longest = shape.longest_run or max(shape.query_lens)
    placed = kernels.compute_slot_mapping(
        token_ids, row, starts, computed, rows.last_tokens, rows.tables, block_size, longest
    )
    block_tables = rows.tables[:, :, : shape.num_blocks].index_select(1, row)
    num_shared = shape.num_common_blocks or [0] * len(block_tables)
    of_groups = [
        AttentionMetadata(
            num_decodes=shape.num_decodes,
            kv_cache=kv_cache.layers,
            query_start_loc=starts,
            seq_lens=placed.seq_lens,
            block_tables=tables,
            slot_mapping=slots,
            query_lens_list=shape.query_lens,
            seq_lens_list=shape.seq_lens,
            num_shared=shared * block_size,
        )
        for tables, slots, shared in zip(block_tables, placed.slot_mapping, num_shared, strict=True)
    ]
    metadata = [of_groups[group] for group in kv_cache.groups]
    return InputBatch(placed.input_ids, placed.positions, metadata, sampled_tokens, sampled_rows, positions)
