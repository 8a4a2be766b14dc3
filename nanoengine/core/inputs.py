"""The tensors of one step, made from a StepPlan.

The host packs the numbers of a step into one buffer and sends them in one copy. Positions, slots, block tables, and tokens that
the host does not know yet are computed on the device, from these numbers and from its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.attention import AttentionMetadata
from nanoengine.core.device import Device
from nanoengine.core.kernels import CoreKernels
from nanoengine.core.kv_cache import KVCache
from nanoengine.core.messages import NULL_BLOCK, UNKNOWN, StepPlan

ALIGNED = 4
"""Numbers in 16 bytes: kernels are compiled for tensors that begin at a multiple of it."""


class Rows:
    """State of each running sequence on the device: last token, and block table in each KV group. One more row is padding."""

    def __init__(self, num_rows: int, num_groups: int, width: int, device: Device):
        self.device, self.padding_row = device, num_rows
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device.torch_device)
        shape = (num_groups, num_rows + 1, width)
        self.tables = torch.full(shape, NULL_BLOCK, dtype=torch.int32, device=device.torch_device)
        # On the host: the tokens that each row started with. Chunks take theirs from it.
        self.token_ids: dict[int, list[int]] = {}

    def apply(self, plan: StepPlan) -> None:
        """Make the changes of a plan, in one copy to the device."""
        for row in plan.ended:
            self.token_ids.pop(row, None)
        self.token_ids |= {start.row: start.token_ids for start in plan.started}
        _, num_rows, width = self.tables.shape
        cells: dict[int, int] = {}  # index in the flat tables -> block; a later change wins
        changes = [(start.row, group, 0, table) for start in plan.started for group, table in enumerate(start.tables)]
        for row, group, first, blocks in (*changes, *plan.tables):
            at = (group * num_rows + row) * width + first
            cells.update(zip(range(at, at + len(blocks)), blocks, strict=True))
        if not cells:
            return
        rows = [start.row for start in plan.started]
        tokens = [start.token_ids[-1] for start in plan.started]
        sent = self.device.send(np.array([*rows, *tokens, *cells, *cells.values()], np.int64))
        targets, last, indices, block_ids = sent.split([len(rows), len(rows), len(cells), len(cells)])
        self.last_tokens.index_copy_(0, targets, last)
        self.tables.view(-1).index_copy_(0, indices, block_ids.to(torch.int32))


@dataclass
class PackedStep:
    """The numbers of a step in host memory, and its lengths on the host.

    The numbers lie one section behind the other: rows, computed tokens and starts of the runs, token ids, then sampled tokens,
    rows and positions.
    """

    query_lens: list[int]
    seq_lens: list[int]  # with the new tokens; upper bounds are enough: exact lengths are on the device
    num_decodes: int  # runs of one token, or a few with drafts, before all others
    num_tokens: int
    num_samples: int
    num_common_blocks: list[int] = field(default_factory=list)
    longest: int | None = None  # length of the padding run, if that is the longest run
    numbers: Tensor = field(init=False)  # [size] int32
    sampled: list[np.ndarray] = field(init=False)  # without padding: the row of each sample, and its position there

    @cached_property
    def sections(self) -> list[slice]:
        runs, sections, start = len(self.query_lens), [], 0
        for size in (runs, runs, runs + 1, self.num_tokens, *[self.num_samples] * 3):
            sections.append(slice(start, start + size))
            start += -(-size // ALIGNED) * ALIGNED
        return sections

    def allocate(self, device: Device) -> list[np.ndarray]:
        """Memory for the numbers, unset, by sections."""
        self.numbers = device.host_tensor(self.sections[-1].stop, torch.int32)
        numbers = self.numbers.numpy()
        return [numbers[section] for section in self.sections]


class InputBatch(NamedTuple):
    """The arguments of a forward pass."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    metadata: list[AttentionMetadata]  # of each layer; one object for each KV group
    sampled_tokens: Tensor  # [num_samples] int32: indices into the tokens of the step


def pack(plan: StepPlan, rows: Rows) -> PackedStep:
    """The numbers of a step. A decode begins with the last token of its row, which only the device may know."""
    count = len(plan.decode_rows)
    packed = PackedStep(
        query_lens=[1] * count + [run.num_new for run in plan.runs],
        seq_lens=(plan.decode_starts + 1).tolist() + [run.start + run.num_new for run in plan.runs],
        num_decodes=count + plan.num_drafted,
        num_tokens=plan.num_tokens,
        num_samples=plan.num_samples,
        num_common_blocks=plan.num_common_blocks,
    )
    row, computed, starts, token_ids, sampled_tokens, sampled_rows, positions = packed.allocate(rows.device)
    row[:count] = sampled_rows[:count] = plan.decode_rows
    computed[:count] = plan.decode_starts
    positions[:count] = plan.decode_starts + 1
    token_ids[:count] = UNKNOWN
    sampled_tokens[:count] = np.arange(count)
    starts[:] = list(accumulate(packed.query_lens, initial=0))
    at = count  # the next sample
    for number, run in enumerate(plan.runs, count):
        first, end = starts[number], starts[number + 1]
        row[number], computed[number] = run.row, run.start
        if run.drafts:
            token_ids[first], token_ids[first + 1 : end] = UNKNOWN, run.drafts
        else:
            token_ids[first:end] = rows.token_ids[run.row][run.start : run.start + run.num_new]
        num_samples = run.num_new if run.drafts else int(run.samples)
        samples = slice(at, at + num_samples)
        sampled_tokens[samples], sampled_rows[samples] = np.arange(end - num_samples, end), run.row
        positions[samples] = run.start + run.num_new + 1 - num_samples + np.arange(num_samples)
        at += num_samples
    packed.sampled = [sampled_rows, positions]
    return packed


def unpack(
    packed: PackedStep, numbers: Tensor, rows: Rows, kernels: CoreKernels, kv_cache: KVCache, block_size: int
) -> InputBatch:
    """The tensors of a step, from its numbers on the device."""
    row, computed, starts, token_ids, sampled_tokens, *_ = (numbers[section] for section in packed.sections)
    state, longest = (rows.last_tokens, rows.tables), packed.longest or max(packed.query_lens)
    tokens = kernels.compute_slot_mapping(token_ids, row, starts, computed, *state, block_size, longest)
    num_blocks = -(-max(packed.seq_lens) // block_size)
    block_tables = rows.tables[:, :, :num_blocks].index_select(1, row)
    num_shared = packed.num_common_blocks or [0] * len(block_tables)
    of_groups = [
        AttentionMetadata(
            num_decodes=packed.num_decodes,
            rows=row,
            kv_cache=kv_cache.layers,
            query_start_loc=starts,
            seq_lens=tokens.seq_lens,
            block_tables=tables,
            slot_mapping=slots,
            query_lens_list=packed.query_lens,
            seq_lens_list=packed.seq_lens,
            num_shared=shared * block_size,
        )
        for tables, slots, shared in zip(block_tables, tokens.slot_mapping, num_shared, strict=True)
    ]
    metadata = [of_groups[group] for group in kv_cache.groups]
    return InputBatch(tokens.input_ids, tokens.positions, metadata, sampled_tokens)
