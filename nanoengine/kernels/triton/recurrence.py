"""The gated delta rule and the scan of Mamba 2, token by token.

Both have a state S of depth x width numbers for each head, in which columns do not know each other, and do with a token
    S = fade S + key change^T,  out = S^T query,
where the change of Mamba 2 is its input, and that of the delta rule what the input differs from what S says of the key.

Decodes, chunks, drafts and snapshots are computed by one compiled kernel, whose multiplications and additions the compiler may
not fuse: sums over the depth have one order, and a state is equal to the bit however its tokens come.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.recurrences import Decay, StateRuns
from nanoengine.kernels.triton.states import SAME_FOR_ALL, arguments, stored_state

COLUMNS = 8
"""Of a state that a program computes: 32 bytes of each row, as memory hands them out."""

NUMBERS_OF_WARP = 1024
"""Of a state: 32 in the registers of each thread."""


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), exact where exp(x) is lost beside 1, too."""
    grown = tl.exp(x)
    total = 1.0 + grown
    log = tl.where(total == 1.0, grown, tl.log(total) * (grown / (total - 1.0)))
    return tl.where(x > 20.0, x, log)


@triton.jit(do_not_specialize=SAME_FOR_ALL)
def _recurrence_kernel(
    query,
    key,
    value,
    fading,
    beta,
    log_rate,
    bias,
    skip,
    states,
    rows,
    starts,
    store_starts,
    store_tokens,
    store_slots,
    has_stores,
    out,
    stride,
    fading_stride,
    beta_stride,
    slot_stride,
    GROUPS: tl.constexpr,
    SHARING: tl.constexpr,
    TILED: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (i, j, k): block k of the columns of head j of run i. Nobody else reads or writes these in its slots. Without beta
    it is Mamba 2; SHARING heads have one query and key, one behind the other or, TILED, every GROUPS-th.
    """
    run, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, BLOCK_DEPTH)
    is_deep, is_wide = depth < DEPTH, column < WIDTH
    mask = is_deep[:, None] & is_wide[None, :]
    first, last = tl.load(starts + run), tl.load(starts + run + 1)
    row = tl.load(rows + run)
    pointers = states + head * (DEPTH * WIDTH) + depth[:, None] * WIDTH + column[None, :]
    state = tl.load(pointers + row.to(tl.int64) * slot_stride, mask=mask, other=0.0)
    rate = -tl.exp(tl.load(log_rate + head))
    offset = tl.load(bias + head)
    at_depth = (head % GROUPS if TILED else head // SHARING) * DEPTH + depth
    at_column = head * WIDTH + column
    number = 0
    end, slot = stored_state(run, number, last, row, store_starts, store_tokens, store_slots, has_stores)
    for token in range(first, last):
        at = tl.cast(token, tl.int64)
        q = tl.load(query + at * stride + at_depth, mask=is_deep, other=0.0).to(tl.float32)
        k = tl.load(key + at * stride + at_depth, mask=is_deep, other=0.0).to(tl.float32)
        v = tl.load(value + at * stride + at_column, mask=is_wide, other=0.0).to(tl.float32)
        time = _softplus(tl.load(fading + at * fading_stride + head).to(tl.float32) + offset)
        fade = tl.exp(rate * time)
        if beta is None:
            change = v * time
        else:
            q = q * (SCALE / tl.sqrt(tl.sum(q * q) + 1e-6))
            k = k * (1.0 / tl.sqrt(tl.sum(k * k) + 1e-6))
            share = 1.0 / (1.0 + tl.exp(-tl.load(beta + at * beta_stride + head).to(tl.float32)))
            change = (v - tl.sum(state * k[:, None], axis=0) * fade) * share
        state = state * fade + k[:, None] * change[None, :]
        result = tl.sum(state * q[:, None], axis=0)
        if skip is not None:
            result += v * tl.load(skip + head)
        tl.store(out + at * (tl.num_programs(1) * WIDTH) + at_column, result, mask=is_wide)
        while end == token:
            tl.store(pointers + slot * slot_stride, state, mask=mask)
            number += 1
            end, slot = stored_state(run, number, last, row, store_starts, store_tokens, store_slots, has_stores)


def delta_rule(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    decay: Decay,
    num_k_heads: int,
    states: Tensor,
    runs: StateRuns,
    *,
    tiled: bool = False,
) -> Tensor:
    """As in `recurrences.py`."""
    depth = num_k_heads * states.shape[2]
    q, k, v = qkv.split((depth, depth, qkv.shape[1] - 2 * depth), dim=1)
    return _recur(q, k, v, a, b, decay, None, num_k_heads, states, runs, tiled)


def mamba2(
    xbc: Tensor, dt: Tensor, decay: Decay, skip: Tensor, num_groups: int, states: Tensor, runs: StateRuns
) -> Tensor:
    """As in `recurrences.py`."""
    depth = num_groups * states.shape[2]
    x, b, c = xbc.split((xbc.shape[1] - 2 * depth, depth, depth), dim=1)
    return _recur(c, b, x, dt, None, decay, skip, num_groups, states, runs)


def _recur(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    fading: Tensor,
    beta: Tensor | None,
    decay: Decay,
    skip: Tensor | None,
    num_groups: int,
    states: Tensor,
    runs: StateRuns,
    tiled: bool = False,
) -> Tensor:
    _, heads, depth, width = states.shape
    assert query.stride(0) == key.stride(0) == value.stride(0)
    out = torch.empty((len(query), heads * width), dtype=torch.float32, device=query.device)
    block = triton.next_power_of_2(depth)
    columns = min(COLUMNS, triton.next_power_of_2(width))
    _recurrence_kernel[(len(runs.rows), heads, triton.cdiv(width, columns))](
        query,
        key,
        value,
        fading,
        beta,
        *decay,
        skip,
        states,
        *arguments(runs),
        out,
        query.stride(0),
        fading.stride(0),
        0 if beta is None else beta.stride(0),
        states.stride(0),
        GROUPS=num_groups,
        SHARING=heads // num_groups,
        TILED=tiled,
        DEPTH=depth,
        WIDTH=width,
        SCALE=depth**-0.5,
        BLOCK_DEPTH=block,
        COLUMNS=columns,
        num_warps=max(1, block * columns // NUMBERS_OF_WARP),
        enable_fp_fusion=False,
    )
    return out
