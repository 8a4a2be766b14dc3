"""Where the tokens of a step stand, worked out on the device: it may still be choosing the tokens that the step begins with.

The host says how many tokens each sequence has before the step and in it. The rest, the block tables of every KV group and each
sequence's last token, stays on the device, in tables with a row for every sequence that runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.core.kernels import TokenPositions

TILE = 256
"""Tokens of a program."""

NUM_WARPS = 4

EVEN = 2
"""Slots of a group begin at a multiple of so many, 16 bytes: the kernels that read them are compiled for that."""


@triton.jit(do_not_specialize=["slot_stride"])  # it follows the tokens of a step
def _slot_mapping_kernel(
    token_ids,
    rows,
    query_start_loc,
    num_computed,
    last_tokens,
    tables,
    padding_row,
    group_stride,
    table_stride,
    slot_stride,
    input_ids,
    positions,
    slot_mapping,
    seq_lens,
    GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (i, j): tile j of the tokens of sequence i, in every KV group."""
    sequence = tl.program_id(0)
    row = tl.load(rows + sequence).to(tl.int64)
    is_padding = row == padding_row
    start = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - start
    computed = tl.load(num_computed + sequence)
    if tl.program_id(1) == 0:
        tl.store(seq_lens + sequence, tl.where(is_padding, 0, computed + query_len))

    offset = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offset < query_len
    token = start.to(tl.int64) + offset
    # A row whose last logits were not finite has token -1: nothing may look up an embedding there.
    last = tl.maximum(tl.load(last_tokens + row), 0)
    host_id = tl.load(token_ids + token, mask=mask, other=0).to(tl.int64)
    position = computed + offset
    tl.store(input_ids + token, tl.where(is_padding, 0, tl.where(host_id < 0, last, host_id)), mask=mask)
    tl.store(positions + token, tl.where(is_padding, 0, position).to(tl.int64), mask=mask)
    visible = offset < tl.where(is_padding, 0, query_len)
    entry = tables + row * table_stride + position // BLOCK_SIZE
    for group in range(GROUPS):
        block = tl.load(entry + tl.cast(group, tl.int64) * group_stride, mask=visible, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        slots = slot_mapping + tl.cast(group, tl.int64) * slot_stride
        tl.store(slots + token, tl.where(is_padding, -1, slot), mask=mask)


def compute_slot_mapping(
    token_ids: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    num_computed: Tensor,
    last_tokens: Tensor,
    tables: Tensor,
    block_size: int,
    max_query_len: int,
) -> TokenPositions:
    """`Kernels.compute_slot_mapping`; a block_size is a power of two. Tokens of padding are 0, at position 0.

    It is launched behind all that comes before it (`dependent.py`): the lengths that it writes are read before others wait.
    """
    num_seqs = len(rows)
    assert block_size == triton.next_power_of_2(block_size), "block_size must be a power of two"
    assert len(query_start_loc) == num_seqs + 1
    num_groups, num_rows, _ = tables.shape
    assert len(last_tokens) == num_rows
    assert tables.stride(2) == 1
    num_tokens = len(token_ids)
    input_ids, positions = last_tokens.new_empty(num_tokens), last_tokens.new_empty(num_tokens)
    slot_mapping = last_tokens.new_empty(num_groups, triton.cdiv(num_tokens, EVEN) * EVEN)[:, :num_tokens]
    seq_lens = torch.empty_like(num_computed)
    if num_seqs:
        _slot_mapping_kernel[(num_seqs, max(1, triton.cdiv(max_query_len, TILE)))](
            token_ids,
            rows,
            query_start_loc,
            num_computed,
            last_tokens,
            tables,
            num_rows - 1,
            *tables.stride()[:2],
            slot_mapping.stride(0),
            input_ids,
            positions,
            slot_mapping,
            seq_lens,
            GROUPS=num_groups,
            BLOCK_SIZE=block_size,
            TILE=TILE,
            num_warps=NUM_WARPS,
        )
    return TokenPositions(input_ids, positions, slot_mapping, seq_lens)
