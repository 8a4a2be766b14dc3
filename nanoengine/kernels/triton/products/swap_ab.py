"""Products of 5 to 64 rows with the weights as the left factor: x W^T is computed as the transpose of W x^T.

Tensor cores multiply tiles of 64 rows of the left factor by 8 to 256 columns of the right one. With a few rows of x as the left
factor most of a tile is empty; as the right one they are as many columns as there are ("swap-AB"). While a program waits for the
kernel before, which computes the rows, its weights come into the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton import dependent
from nanoengine.kernels.triton.attention.paged_cache import INTERPRETED, dot
from nanoengine.kernels.triton.launch import num_multiprocessors
from nanoengine.kernels.triton.products.activation import gated
from nanoengine.kernels.triton.products.ahead import prefetch
from nanoengine.kernels.triton.products.fusion import Fusion
from nanoengine.kernels.triton.workspace import Workspace

MOST_ROWS = 64
"""Rows of a program. For more of them, programs that share rows as well as weights are quicker."""

LEAST_ROWS = 16
"""Columns of the right factor that Triton multiplies at least. Those that are not there are zeros."""

TILE = 64
"""Rows of the left factor: outputs of a program, or half as many gates and what they are multiplied with."""

DEPTH = 64
"""Inputs that are multiplied at a time."""

LEAST_STEPS = 4
"""Times DEPTH inputs that a part of a product has at least."""

LEAST_PARTS = 3
"""The least parts of a product: adding the sums of fewer takes more time than is saved."""

NUM_WARPS = 4
NUM_STAGES = 4


@triton.jit(do_not_specialize=["num_rows"])
def _swap_ab_kernel(
    x,
    weight,
    bias,
    out,
    partial,
    arrivals,
    num_rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    PREFETCH: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Program (i, p): PART inputs of tile i, which is TILE outputs, or the gates and the other values of half as many.

    Programs of a tile that has several parts write float32 sums to `partial`, [tiles, PARTS, TILE, ROWS]; the last to arrive, by
    the count of `arrivals`, adds them in the order of the parts.
    """
    dependent.start(LAUNCH)
    OWN: tl.constexpr = TILE // 2 if GATE else TILE
    first = tl.program_id(0) * OWN
    line = tl.arange(0, TILE)
    output = first + line % OWN
    matrix_row = output + line // OWN * OUTPUTS  # weights of gates, and behind those what they are multiplied with
    start = tl.program_id(1) * PART
    end = tl.minimum(start + PART, INPUTS)
    line_start = weight + matrix_row.to(tl.int64) * INPUTS
    if PREFETCH:
        HALF: tl.constexpr = PART // 2
        piece = start + tl.arange(0, 2)[None, :] * HALF
        count = tl.where((output < OUTPUTS)[:, None], tl.minimum(end - piece, HALF), 0)
        prefetch(line_start[:, None] + piece, count)
    if BIAS:
        offset = tl.load(bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)
    dependent.wait(LAUNCH)

    row, step = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    has_row = (row < num_rows)[None, :]
    acc = tl.zeros([TILE, ROWS], tl.float32)
    for depth in range(start, end, DEPTH):
        column = depth + step
        weights_mask = tl.full([TILE, DEPTH], True, tl.int1)
        rows_mask = has_row
        if INPUTS % DEPTH:
            weights_mask &= (column < INPUTS)[None, :]
            rows_mask = has_row & (column < INPUTS)[:, None]
        if OUTPUTS % OWN:
            weights_mask &= (output < OUTPUTS)[:, None]
        weights = tl.load(line_start[:, None] + column[None, :], mask=weights_mask, other=0.0)
        rows = tl.load(x + row[None, :] * INPUTS + column[:, None], mask=rows_mask, other=0.0)
        acc = dot(weights, rows, acc)

    if PARTS > 1:
        pointers = partial + tl.program_id(0) * (PARTS * TILE * ROWS) + line[:, None] * ROWS + row[None, :]
        tl.store(pointers + tl.program_id(1) * (TILE * ROWS), acc)
        # One thread counts for all: before it does, all have stored; then all see what others stored before they counted.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel", scope="gpu") != PARTS - 1:
            return
        tl.store(arrivals + tl.program_id(0), 0)  # nobody else comes before the next launch
        acc = tl.zeros([TILE, ROWS], tl.float32)
        for part in tl.range(0, PARTS, num_stages=4):  # loads sums three rounds before they are added
            acc += tl.load(pointers + part * (TILE * ROWS))
    if GATE:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, OWN, ROWS]), [1, 2, 0]))
        acc = gated(gate, up, ACTIVATION)
    if BIAS:
        acc += offset[:, None]
    output = first + tl.arange(0, OWN)
    target = out + row[None, :] * OUTPUTS + output[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(output < OUTPUTS)[:, None] & has_row)


def swap_ab(x: Tensor, weight: Tensor, fusion: Fusion, workspace: Workspace) -> Tensor:
    """x W^T + bias, or the gate of it; sums are float32, and rounded once.

    Where tiles are too few to fill the device, their inputs are cut into parts that run side by side.

    Args:
        x: [num_rows, inputs] of 16-bit numbers, at most MOST_ROWS rows.
        weight: [outputs, inputs]; for gates those of the gates, and then those of what they are multiplied with.
        fusion: without a norm.
        workspace: of the engine; no other launch may use it at the same time.

    Returns:
        [num_rows, outputs], or half as wide for gates.
    """
    num_rows, inputs = x.shape
    outputs = len(weight) // fusion.sets
    assert num_rows <= MOST_ROWS
    assert x.dtype != torch.float32
    assert weight.is_contiguous()
    assert fusion.norm is None
    x = x.contiguous()
    out, _ = fusion.results(x, outputs)
    if not num_rows:
        return out
    rows = max(LEAST_ROWS, triton.next_power_of_2(num_rows))
    tiles = triton.cdiv(weight.shape[0], TILE)
    steps = triton.cdiv(inputs, DEPTH)
    parts = _parts(tiles, steps, num_multiprocessors(x.device, 132))
    partial = x.new_empty(tiles * TILE * rows * parts if parts > 1 else 0, dtype=torch.float32)
    _swap_ab_kernel[(tiles, parts)](
        *(x, weight, fusion.bias, out, partial, workspace.counters(tiles, x.device), num_rows),
        INPUTS=inputs,
        OUTPUTS=outputs,
        ROWS=rows,
        TILE=TILE,
        DEPTH=DEPTH,
        PARTS=parts,
        PART=triton.cdiv(steps, parts) * DEPTH,
        PREFETCH=bool(fusion.launch) and not INTERPRETED.value and inputs % 8 == 0 and weight.data_ptr() % 16 == 0,
        **fusion.behind(),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return out


def _parts(tiles: int, steps: int, num_sms: int) -> int:
    """Parts of so many steps that a tile is cut into; none of them is empty."""
    parts = min(num_sms // tiles, steps // LEAST_STEPS)
    return triton.cdiv(steps, triton.cdiv(steps, parts)) if parts >= LEAST_PARTS else 1
