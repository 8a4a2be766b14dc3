"""A gated MLP of one row in one cooperative launch, for models that are small enough.

As many programs as run side by side compute gates; they count their arrivals, and some of them go on with the second product. So
there is one kernel's end less to wait for. What is rounded is what two kernels would round.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton.attention.paged_cache import INTERPRETED
from nanoengine.kernels.triton.launch import num_multiprocessors
from nanoengine.kernels.triton.products.ahead import elements_of_slice, prefetch_slice
from nanoengine.kernels.triton.products.fusion import Fusion
from nanoengine.kernels.triton.products.gemv import NUM_WARPS, gemv_kernel, load_chunks, sizes_of, sums
from nanoengine.kernels.triton.workspace import Workspace

HELD, AHEAD = 1, 2
"""How the weights of the second product come: into registers before the wait; or into the L2 cache, and from there into registers
while the programs wait at the barrier, so that more kernels run side by side with this one."""

PROGRAMS_PER_SM = 3
MOST_REGISTERS = {HELD: 168, AHEAD: 128}
"""Of a thread, with so many programs on a multiprocessor; 128 leave room for two programs of the product before."""

BESIDE = 56
"""Registers of a thread that hold no weights."""

MOST_POLLS = tl.constexpr(1 << 22)
"""Seconds: programs that wait longer give up, and the results are wrong."""


@triton.jit
def _arrive(arrivals):
    """Count this program; returns the count before, and that behind it. All that it has stored is visible behind the barrier.

    When all have arrived, the sign of the count changes, and all other bits are zeros again: no launch need reset it.
    """
    tl.debug_barrier()
    step = tl.where(tl.program_id(0) == 0, 0x7FFFFFFF - (tl.num_programs(0) - 2), 1)
    before = tl.atomic_add(arrivals, step, sem="acq_rel", scope="gpu")
    return before, before + step


@triton.jit
def _barrier(arrivals, before, count):
    """Wait until all programs have arrived."""
    polls = 0
    while ((before ^ count) >= 0) & (polls < MOST_POLLS):
        count = tl.atomic_add(arrivals, 0, sem="acquire", scope="gpu")
        polls += 1
    tl.debug_barrier()


@triton.jit
def _mlp_kernel(
    arrivals,
    x,
    residual,
    norm_weight,
    gate_up,
    down,
    gates,
    bias,
    out,
    new_residual,
    eps,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    DOWN_TILE: tl.constexpr,
    DOWN_CHUNK: tl.constexpr,
    DOWN_PREFETCH: tl.constexpr,
    HELD: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    LAUNCH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Program i: gates [i * TILE, (i + 1) * TILE), and outputs [i * DOWN_TILE, (i + 1) * DOWN_TILE) if there are such.

    PARTS is 3, or where programs run one after the other, 1 for the gates and 2 for the rest. DOWN_PREFETCH of its weights are
    prefetched by every program, unless they are HELD. There are gates, and no bias.
    """
    CHUNKS: tl.constexpr = (HIDDEN + CHUNK - 1) // CHUNK
    DOWN_CHUNKS: tl.constexpr = (SIZE + DOWN_CHUNK - 1) // DOWN_CHUNK
    column = tl.arange(0, DOWN_CHUNK)
    output = tl.program_id(0) * DOWN_TILE + tl.arange(0, DOWN_TILE)
    columns, mask = column[None, :], (output < HIDDEN)[:, None]
    pointers = down + output.to(tl.int64)[:, None] * SIZE + columns
    if HELD:
        weights = load_chunks(pointers, columns, mask, DOWN_CHUNKS, SIZE, DOWN_CHUNK, True)
    else:
        prefetch_slice(down, DOWN_PREFETCH)
    if PARTS % 2:
        gemv_kernel(
            *(x, residual, norm_weight, gate_up, bias, gates, new_residual, eps),
            *(None, None, 0, 0),
            *(1, HIDDEN, SIZE, TILE, CHUNK, CHUNKS, ADD, NORM, GATE, ACTIVATION, BIAS, LAUNCH),
        )
    if PARTS == 3:
        before, count = _arrive(arrivals)
    if PARTS > 1 and tl.program_id(0) * DOWN_TILE < HIDDEN:
        if not HELD:
            weights = load_chunks(pointers, columns, mask, DOWN_CHUNKS, SIZE, DOWN_CHUNK, True)
        if PARTS == 3:
            _barrier(arrivals, before, count)
        values = load_chunks(gates + column, column, True, DOWN_CHUNKS, SIZE, DOWN_CHUNK, False)
        result = sums(
            *(values, values, weights, 1.0, weights, pointers, columns, mask),
            *(DOWN_CHUNKS, DOWN_CHUNKS, SIZE, DOWN_CHUNK, True, False, False),
        )
        tl.store(out + output, result.to(out.dtype.element_ty), mask=output < HIDDEN)


def fitting_sizes(hidden: int, size: int, itemsize: int, device: torch.device, how: int) -> dict[str, int] | None:
    """Sizes of the programs, for all of which the device has room at the same time; None if it has not."""
    programs = PROGRAMS_PER_SM * num_multiprocessors(device, 132)
    tile = triton.next_power_of_2(triton.cdiv(size, programs))
    down_tile = triton.next_power_of_2(triton.cdiv(hidden, triton.cdiv(size, tile)))
    chunk, down_chunk = (sizes_of(inputs, 1, itemsize)["CHUNK"] for inputs in (hidden, size))
    held = 2 * tile * triton.cdiv(hidden, chunk) * chunk
    later = down_tile * triton.cdiv(size, down_chunk) * down_chunk
    held = held + later if how == HELD else max(held, later)
    if held * itemsize // (4 * 32 * NUM_WARPS) + BESIDE > MOST_REGISTERS[how]:
        return None
    return {"TILE": tile, "CHUNK": chunk, "DOWN_TILE": down_tile, "DOWN_CHUNK": down_chunk}


def mlp_of_one_row(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    fusion: Fusion,
    workspace: Workspace,
    sizes: dict[str, int],
    how: int = HELD,
) -> tuple[Tensor, Tensor]:
    """`gemv` of gates, and of what they make: see `Kernels.mlp`.

    Args:
        x: [1, hidden].
        gate_up: [2 * size, hidden]; down: [hidden, size].
        fusion: with the first product; it has an activation, and no bias.
        workspace: for launches of this kernel alone: what they leave in it are no zeros.
        sizes: `fitting_sizes` of it.
        how: HELD or AHEAD.
    """
    hidden, size = down.shape
    assert len(x) == 1
    assert gate_up.is_contiguous()
    assert down.is_contiguous()
    assert fusion.activation is not None
    x = x.contiguous()
    gates, (out, total) = x.new_empty(1, size), fusion.results(x, hidden)
    programs = triton.cdiv(size, sizes["TILE"])
    options: dict[str, Any] = {"launch_cooperative_grid": True, "maxnreg": MOST_REGISTERS[how]}
    for parts in (1, 2) if INTERPRETED.value else (3,):
        _mlp_kernel[(programs,)](
            workspace.counters(1, x.device),
            *fusion.arguments(x, out, total, gate_up, down, gates),
            HIDDEN=hidden,
            SIZE=size,
            **sizes,
            DOWN_PREFETCH=elements_of_slice(down, programs, fusion.launch),
            HELD=how == HELD,
            **fusion.before(),
            **fusion.behind(),
            PARTS=parts,
            num_warps=NUM_WARPS,
            **({} if INTERPRETED.value else options),
        )
    return out, total
