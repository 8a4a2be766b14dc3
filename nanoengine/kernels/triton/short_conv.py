"""Causal convolutions of each channel over a few tokens, whose last inputs are the state of a sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.recurrences import StateRuns
from nanoengine.kernels.triton.states import SAME_FOR_ALL, arguments, stored_state

DECODES, CHUNKS = (1, 128), (32, 32)
"""Tokens and channels that a program computes at once. No output is made of others, so all round alike."""

NUM_WARPS = 4


@triton.jit
def _inputs(x, before, past, token, first, channel, mask, stride, before_stride, TAPS: tl.constexpr, CHANNELS):
    """What is convolved of tokens; that of the TAPS - 1 before the run is in its state."""
    is_new = token >= first
    offset = token.to(tl.int64)
    value = tl.load(x + offset * stride + channel, mask=mask & is_new, other=0.0).to(tl.float32)
    if before is not None:
        value *= tl.load(before + offset * before_stride + channel, mask=mask & is_new, other=0.0).to(tl.float32)
    state = tl.load(past + (token - first + (TAPS - 1)) * CHANNELS + channel, mask=mask & (token < first), other=0.0)
    return tl.where(is_new, value, state)


@triton.jit(do_not_specialize=SAME_FOR_ALL)
def _short_conv_kernel(
    x,
    before,
    after,
    weight,
    bias,
    states,
    rows,
    starts,
    store_starts,
    store_tokens,
    store_slots,
    has_stores,
    out,
    stride,
    before_stride,
    after_stride,
    slot_stride,
    channels,
    TAPS: tl.constexpr,
    WINDOW: tl.constexpr,
    SILU: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (i, j): block j of the channels of run i. Nobody else reads or writes these channels of its slots."""
    run = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_channel = channel < channels
    first, last = tl.load(starts + run), tl.load(starts + run + 1)
    row = tl.load(rows + run)
    past = states + row.to(tl.int64) * slot_stride
    for start in range(first, last, TILE):
        token = start + tl.arange(0, TILE)[:, None]
        mask = (token < last) & is_channel
        total = tl.zeros((TILE, BLOCK), tl.float32)
        if bias is not None:
            total += tl.load(bias + channel, mask=is_channel, other=0.0)
        for tap in tl.static_range(TAPS):
            at = token + (tap - (TAPS - 1))
            value = _inputs(x, before, past, at, first, channel, mask, stride, before_stride, TAPS, channels)
            total += tl.load(weight + tap * channels + channel, mask=is_channel, other=0.0) * value
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        offset = token.to(tl.int64)
        if after is not None:
            total *= tl.load(after + offset * after_stride + channel, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + offset * channels + channel, total.to(out.dtype.element_ty), mask=mask)

    window = tl.arange(0, WINDOW)[:, None]
    mask = (window < TAPS - 1) & is_channel
    number = 0
    token, slot = stored_state(run, number, last, row, store_starts, store_tokens, store_slots, has_stores)
    while token >= 0:
        at = token + (window - (TAPS - 2))
        value = _inputs(x, before, past, at, first, channel, mask, stride, before_stride, TAPS, channels)
        tl.debug_barrier()  # all threads have read the old state: the new one may be written over it
        tl.store(states + slot * slot_stride + window * channels + channel, value, mask=mask)
        number += 1
        token, slot = stored_state(run, number, last, row, store_starts, store_tokens, store_slots, has_stores)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    runs: StateRuns,
    *,
    before: Tensor | None = None,
    after: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """As in `recurrences.py`. A run stores its state in its row's slot last."""
    (num_tokens, channels), taps = x.shape, len(weight)
    out = torch.empty((num_tokens, channels), dtype=x.dtype, device=x.device)
    tile, block = DECODES if num_tokens == len(runs.rows) else CHUNKS
    strides = [0 if part is None else _row_stride(part) for part in (x, before, after)]
    _short_conv_kernel[(len(runs.rows), triton.cdiv(channels, block))](
        x,
        before,
        after,
        weight,
        bias,
        states,
        *arguments(runs),
        out,
        *strides,
        states.stride(0),
        channels,
        TAPS=taps,
        WINDOW=triton.next_power_of_2(max(taps - 1, 1)),
        SILU=silu,
        TILE=tile,
        BLOCK=block,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return out


def _row_stride(part: Tensor) -> int:
    assert part.stride(1) == 1 or part.shape[1] == 1
    return part.stride(0)
