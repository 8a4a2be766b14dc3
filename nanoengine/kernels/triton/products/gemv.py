"""Products of one to four rows, whose weights are on their way before the rows are there.

Such a product takes as long as its weights take to come from memory, and memory must not stand still between two products. So a
program asks for all its weights first, keeps them in registers, and only then waits for the kernel before, which computes the
rows (`dependent.py`). Sums are multiplications and additions of float32: tensor cores would compute eight rows at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton import dependent
from nanoengine.kernels.triton.products.activation import gated
from nanoengine.kernels.triton.products.ahead import prefetch_args, prefetch_slice
from nanoengine.kernels.triton.products.fusion import Fusion

MOST_ROWS = 4
"""Rows that a program computes, one after the other; for more, tensor cores are quicker."""

WIDEST_NORMED = 5120
"""Inputs of several rows with a norm: two whole rows are in registers then, and more of them would be spilled."""

CHUNK = 1024
"""Inputs that are loaded at once: 16 bytes for each thread, if numbers have 16 bits."""

LARGEST_CHUNK = 4096
"""The same where the inputs are a power of two, and make one chunk."""

BYTES = 1 << 14
"""Weights that a program reads, or up to twice as many, since its outputs are a power of two."""

HELD_BYTES = 1 << 15
"""Weights that a program keeps in registers while it waits: 64 registers of every thread. It loads the rest behind the wait."""

NUM_WARPS = 4


@triton.jit
def _load(pointer, column, mask, first: tl.constexpr, INPUTS: tl.constexpr, CHUNK: tl.constexpr, MASK: tl.constexpr):
    """A chunk of inputs, from `first` on; what is behind the last input is 0, and with MASK what is masked."""
    if MASK:
        return tl.load(pointer + first, mask=mask & (first + column < INPUTS), other=0.0)
    if first + CHUNK > INPUTS:
        return tl.load(pointer + first, mask=first + column < INPUTS, other=0.0)
    return tl.load(pointer + first)


@triton.jit
def load_chunks(
    pointer, column, mask, COUNT: tl.constexpr, INPUTS: tl.constexpr, CHUNK: tl.constexpr, MASK: tl.constexpr
):
    """The first so many chunks."""
    chunks = ()
    for i in tl.static_range(COUNT):  # Triton knows sums of tuples, and no unpacking
        chunks = chunks + (_load(pointer, column, mask, i * CHUNK, INPUTS, CHUNK, MASK),)  # type: ignore[assignment]  # noqa: RUF005
    return chunks


@triton.jit
def _added(values, added, ADD: tl.constexpr):
    """Elements of x, or of x + residual, rounded to their dtype; as float32."""
    if ADD:
        return (values.to(tl.float32) + added.to(tl.float32)).to(values.dtype).to(tl.float32)
    return values.to(tl.float32)


@triton.jit
def _scale(values, added, eps, INPUTS: tl.constexpr, CHUNKS: tl.constexpr, ADD: tl.constexpr):
    """The factor of a norm for a row in chunks, without the norm's weights."""
    squares = tl.zeros(values[0].shape, tl.float32)
    for i in tl.static_range(CHUNKS):
        value = _added(values[i], added[i], ADD)
        squares += value * value
    return 1.0 / tl.sqrt(tl.sum(squares) / INPUTS + eps)


@triton.jit
def sums(
    values,
    added,
    factors,
    scale,
    weights,
    pointers,
    column,
    mask,
    CHUNKS: tl.constexpr,
    HELD: tl.constexpr,
    INPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    MASK: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
):
    """The product of a row in chunks, and the weights of a tile, of which HELD chunks are there."""
    acc = tl.zeros([mask.shape[0], CHUNK], tl.float32)
    for i in tl.static_range(CHUNKS):
        value = _added(values[i], added[i], ADD)
        if NORM:
            value = (value * scale * factors[i]).to(values[i].dtype).to(tl.float32)
        chunk = weights[i] if i < HELD else _load(pointers, column, mask, i * CHUNK, INPUTS, CHUNK, MASK)
        acc += chunk.to(tl.float32) * value[None, :]
    return tl.sum(acc, axis=1)


@triton.jit
def gemv_kernel(
    x,
    residual,
    norm_weight,
    weight,
    bias,
    out,
    new_residual,
    eps,
    first_ahead,
    second_ahead,
    FIRST_COUNT: tl.constexpr,
    SECOND_COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    HELD: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Program i: outputs [i * TILE, (i + 1) * TILE) of all rows. Weights of the first HELD chunks are loaded before the wait."""
    dependent.start(LAUNCH)
    CHUNKS: tl.constexpr = (INPUTS + CHUNK - 1) // CHUNK
    MASK: tl.constexpr = OUTPUTS % TILE != 0
    column = tl.arange(0, CHUNK)
    output = tl.program_id(0) * TILE + tl.arange(0, TILE)
    has_output = output < OUTPUTS
    pointers = weight + tl.program_id(0).to(tl.int64) * (TILE * INPUTS)
    pointers += tl.arange(0, TILE)[:, None] * INPUTS + column[None, :]
    columns, mask = column[None, :], has_output[:, None]
    weights = load_chunks(pointers, columns, mask, HELD, INPUTS, CHUNK, MASK)
    if GATE:  # behind the weights of the gates stand those of what they are multiplied with
        up_pointers = pointers + OUTPUTS * INPUTS
        ups = load_chunks(up_pointers, columns, mask, HELD, INPUTS, CHUNK, MASK)
    factors = weights
    if NORM:
        factors = load_chunks(norm_weight + column, column, True, CHUNKS, INPUTS, CHUNK, False)
    if BIAS:
        offset = tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)
    dependent.wait(LAUNCH)

    values = load_chunks(x + column, column, True, CHUNKS, INPUTS, CHUNK, False)
    added, scale = values, 1.0
    if ADD:
        added = load_chunks(residual + column, column, True, CHUNKS, INPUTS, CHUNK, False)
    for row in tl.static_range(ROWS):
        inputs_row, added_row = values, added
        if row + 1 < ROWS:  # the next row comes while this one is computed
            start = (row + 1) * INPUTS + column
            values = load_chunks(x + start, column, True, CHUNKS, INPUTS, CHUNK, False)
            if ADD:
                added = load_chunks(residual + start, column, True, CHUNKS, INPUTS, CHUNK, False)
        if ADD and tl.program_id(0) == 0:  # not over the residual: other programs still read it
            for i in tl.static_range(CHUNKS):
                total = _added(inputs_row[i], added_row[i], ADD).to(x.dtype.element_ty)
                target = new_residual + row * INPUTS + i * CHUNK + column
                tl.store(target, total, mask=i * CHUNK + column < INPUTS)
        if NORM:
            scale = _scale(inputs_row, added_row, eps, INPUTS, CHUNKS, ADD)
        result = sums(
            *(inputs_row, added_row, factors, scale, weights, pointers, columns, mask),
            *(CHUNKS, HELD, INPUTS, CHUNK, MASK, ADD, NORM),
        )
        if GATE:
            up = sums(
                *(inputs_row, added_row, factors, scale, ups, up_pointers, columns, mask),
                *(CHUNKS, HELD, INPUTS, CHUNK, MASK, ADD, NORM),
            )
            result = gated(result, up, ACTIVATION)
        if BIAS:
            result += offset
        tl.store(out + row * OUTPUTS + output, result.to(out.dtype.element_ty), mask=has_output)
    prefetch_slice(first_ahead, FIRST_COUNT)
    prefetch_slice(second_ahead, SECOND_COUNT)


def gemv(x: Tensor, weight: Tensor, fusion: Fusion, ahead: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
    """The same as `few_rows.product_of_few_rows` of a weight that is not packed, and rounded where that is.

    Args:
        x: [num_rows, inputs], at most MOST_ROWS rows.
        ahead: weights of products that come soon; as this one ends, it asks for them (`ahead.py`).

    Returns:
        [num_rows, outputs], or half as wide for gates; and x + residual, or x if there is no residual.
    """
    out, total, args, constants = arguments(x, weight, fusion)
    if len(x):
        programs = triton.cdiv(out.shape[1], constants["TILE"])
        gemv_kernel[(programs,)](*args, *prefetch_args(ahead, programs, fusion.launch), **constants)
    return out, total


def arguments(x: Tensor, weight: Tensor, fusion: Fusion) -> tuple[Tensor, Tensor, tuple[Any, ...], dict[str, Any]]:
    """Both results of `gemv`, arguments of the kernel up to eps, and its constants with options of the launch."""
    (num_rows, inputs), outputs = x.shape, len(weight) // fusion.sets
    assert num_rows <= MOST_ROWS
    assert weight.is_contiguous()
    x = x.contiguous()
    out, total = fusion.results(x, outputs)
    return (
        out,
        total,
        fusion.arguments(x, out, total, weight),
        {
            "ROWS": num_rows,
            "INPUTS": inputs,
            "OUTPUTS": outputs,
            **sizes_of(inputs, outputs, weight.element_size() * fusion.sets),
            **fusion.before(),
            **fusion.behind(),
            "num_warps": NUM_WARPS,
        },
    )


def sizes_of(inputs: int, outputs: int, bytes_of_input: int) -> dict[str, int]:
    """Outputs of a program, inputs of a chunk, and how many chunks are loaded before the wait.

    Args:
        bytes_of_input: weights of an input and one output, or of a gate and what it is multiplied with.
    """
    chunk = triton.next_power_of_2(inputs)
    if chunk != inputs or chunk > LARGEST_CHUNK:
        chunk = min(chunk, CHUNK)
    tile = triton.next_power_of_2(triton.cdiv(BYTES * 7 // 8, inputs * bytes_of_input))
    tile = min(tile, triton.next_power_of_2(outputs))
    held = max(1, HELD_BYTES // (tile * chunk * bytes_of_input))
    return {"TILE": tile, "CHUNK": chunk, "HELD": min(held, triton.cdiv(inputs, chunk))}
