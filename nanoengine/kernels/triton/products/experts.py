"""Mixture of experts: choices sorted by expert, the products of each expert's rows, and the sum of what a row's experts say.

The host does not know how many rows an expert has. So there are as many programs as any choice could need, and each finds out
whose rows it multiplies; those that find none end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.operations import ExpertBiases
from nanoengine.kernels.reference.gates import ACTIVATIONS
from nanoengine.kernels.triton.attention.paged_cache import dot
from nanoengine.kernels.triton.products.activation import gated

SORTED_AT_ONCE = 1024
"""Choices that a program looks at at a time."""

SUMMED_AT_ONCE = 512
"""Columns of a program that sums."""

NUM_WARPS = 4
NUM_STAGES = 4


@triton.jit(do_not_specialize=["num_choices"])
def _sort_kernel(chosen, starts, order, num_choices, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Program e: the choices of expert e in ascending order, from starts[e] on, behind those of the experts before."""
    expert = tl.program_id(0)
    step = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    expert_count = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_choices, BLOCK):
        choice = first + step
        choices = tl.load(chosen + choice, mask=choice < num_choices, other=EXPERTS)
        before += (choices < expert).to(tl.int32)
        expert_count += (choices == expert).to(tl.int32)
    start = tl.sum(before)
    tl.store(starts + expert, start)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, start + tl.sum(expert_count))
    for first in range(0, num_choices, BLOCK):
        choice = first + step
        is_chosen = tl.load(chosen + choice, mask=choice < num_choices, other=EXPERTS) == expert
        count = tl.cumsum(is_chosen.to(tl.int32), axis=0)
        tl.store(order + start + count - 1, choice, mask=is_chosen)
        start += tl.sum(is_chosen.to(tl.int32))


@triton.jit
def _product_kernel(
    x,
    weight,
    ups,
    bias,
    up_bias,
    factors,
    out,
    starts,
    order,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PER_ROW: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALL: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Program (i, j): outputs [j * TILE, (j + 1) * TILE) of the i-th tile of ROWS sorted choices of one expert.

    With GATE, from x by rows to gated values by sorted choices; without, from these to float32 by choices as they were, times
    their factors. ALL is a power of two, no smaller than EXPERTS.
    """
    number = tl.arange(0, ALL)
    first = tl.load(starts + number, mask=number < EXPERTS, other=0)
    end = tl.load(starts + number + 1, mask=number < EXPERTS, other=0)
    tiles = (end - first + ROWS - 1) // ROWS
    tiles_end = tl.cumsum(tiles, axis=0)
    expert = tl.sum((tiles_end <= tl.program_id(0)).to(tl.int32))
    if expert >= EXPERTS:
        return
    is_it = number == expert
    end = tl.sum(tl.where(is_it, end, 0))
    tile = tl.program_id(0) - tl.sum(tl.where(is_it, tiles_end - tiles, 0))
    position = tl.sum(tl.where(is_it, first, 0)) + tile * ROWS + tl.arange(0, ROWS)
    has_row = position < end
    choice = tl.load(order + position, mask=has_row, other=0)
    position = position.to(tl.int64)
    row = (choice // PER_ROW).to(tl.int64) if GATE else position

    output = tl.program_id(1) * TILE + tl.arange(0, TILE)
    has_output = (output < OUTPUTS)[:, None]
    step = tl.arange(0, DEPTH)
    matrix = expert.to(tl.int64) * (OUTPUTS * INPUTS) + output[:, None] * INPUTS
    acc = tl.zeros([TILE, ROWS], tl.float32)
    gate = tl.zeros([TILE, ROWS], tl.float32)
    for depth in range(0, INPUTS, DEPTH):
        column = depth + step
        present = (column < INPUTS)[None, :]
        values = tl.trans(
            tl.load(x + row[:, None] * INPUTS + column[None, :], mask=has_row[:, None] & present, other=0.0)
        )
        source = matrix + column[None, :]
        weights = tl.load(weight + source, mask=has_output & present, other=0.0)
        if GATE:
            gate = dot(weights, values, gate)
            acc = dot(tl.load(ups + source, mask=has_output & present, other=0.0), values, acc)
        else:
            acc = dot(weights, values, acc)
    if BIAS:
        bias_offset = expert.to(tl.int64) * OUTPUTS + output
        row_bias = tl.load(bias + bias_offset, mask=output < OUTPUTS, other=0.0)[:, None]
        if GATE:
            gate += row_bias
            acc += tl.load(up_bias + bias_offset, mask=output < OUTPUTS, other=0.0)[:, None]
        else:
            acc += row_bias
    if GATE:
        acc = gated(gate, acc, ACTIVATION)
        target = position
    else:
        acc *= tl.load(factors + choice, mask=has_row, other=0.0)[None, :]
        target = choice.to(tl.int64)
    tl.store(
        out + target[None, :] * OUTPUTS + output[:, None],
        acc.to(out.dtype.element_ty),
        mask=has_output & has_row[None, :],
    )


@triton.jit
def _sum_kernel(parts, out, WIDTH: tl.constexpr, PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Program (i, j): block j of row i of out, the sum of PER_ROW rows of parts in their order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(PER_ROW):
        total += tl.load(parts + (row * PER_ROW + i) * WIDTH + column, mask=mask, other=0.0)
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=mask)


def sum_of_experts(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    chosen: Tensor,
    factors: Tensor,
    activation: str = "silu",
    biases: ExpertBiases | None = None,
) -> Tensor:
    """`Kernels.experts`, of tensors. Gated values are rounded to the dtype of x before they are multiplied again.

    Args:
        gate, up: [experts, size, hidden].
        down: [experts, hidden, size].
    """
    num_experts, size, hidden = gate.shape
    assert gate.shape == up.shape == (len(down), down.shape[2], down.shape[1])
    x, chosen, factors = x.contiguous(), chosen.contiguous(), factors.contiguous()
    out, num_choices, per_row = torch.empty_like(x), chosen.numel(), chosen.shape[1]
    if not num_choices:
        return out.zero_()
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
    order = torch.empty(num_choices, dtype=torch.int32, device=x.device)
    _sort_kernel[(num_experts,)](
        chosen, starts, order, num_choices, EXPERTS=num_experts, BLOCK=SORTED_AT_ONCE, num_warps=NUM_WARPS
    )

    rows, tile, depth, warps = _shape(x.dtype, num_choices / num_experts)
    # The last tile of an expert may hold one row.
    most_tiles = (num_choices + min(num_experts, num_choices) * (rows - 1)) // rows
    constants = {
        "PER_ROW": per_row,
        "EXPERTS": num_experts,
        "ALL": triton.next_power_of_2(num_experts),
        "ROWS": rows,
        "TILE": tile,
        "DEPTH": depth,
        "ACTIVATION": ACTIVATIONS.index(activation),
        "BIAS": biases is not None,
        "num_warps": warps,
        "num_stages": NUM_STAGES,
    }
    of_gate, of_up, of_down = (None,) * 3 if biases is None else biases
    values = x.new_empty(num_choices, size)
    _product_kernel[(most_tiles, triton.cdiv(size, tile))](
        x, gate, up, of_gate, of_up, None, values, starts, order, INPUTS=hidden, OUTPUTS=size, GATE=True, **constants
    )
    parts = torch.empty(num_choices, hidden, dtype=torch.float32, device=x.device)
    _product_kernel[(most_tiles, triton.cdiv(hidden, tile))](
        values,
        down,
        None,
        of_down,
        None,
        factors,
        parts,
        starts,
        order,
        INPUTS=size,
        OUTPUTS=hidden,
        GATE=False,
        **constants,
    )
    _sum_kernel[(len(x), triton.cdiv(hidden, SUMMED_AT_ONCE))](
        parts, out, WIDTH=hidden, PER_ROW=per_row, BLOCK=SUMMED_AT_ONCE, num_warps=NUM_WARPS
    )
    return out


def _shape(dtype: torch.dtype, rows_per_expert: float) -> tuple[int, int, int, int]:
    """Rows and outputs of a program, inputs that it reads at a time, and its warps.

    It reads all weights of its outputs, be its rows few or many: if experts have more rows, so have programs.
    """
    if dtype is torch.float32:  # exact products take no tensor cores, and the registers of all threads
        return 16, 16, 64, 4
    return (16, 16, 256, 4) if rows_per_expert <= 16 else (64, 128, 32, 8)
