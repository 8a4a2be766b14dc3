"""Products of 1 to 4 rows with weights of 8 and 4 bits, in one kernel with the addition and the norm before them and the gate
behind them.

A program asks for all its weights, scales and zeros before it waits for the kernel before it. Then it needs few instructions for
each weight: a permute and a subtraction make a number of it (`packed.py`), and a multiplication adds it, for each row, to the sum
of a few neighbouring bytes, to which the scale of their group is applied. The norm needs no extra pass: its factor is that
of a whole row, and is applied to the result. But for x + residual, nothing is rounded before the end.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton import dependent
from nanoengine.kernels.triton.products.activation import gated
from nanoengine.kernels.triton.products.fusion import Fusion
from nanoengine.kernels.triton.products.packed import PackedWeight, column_of, raised_numbers, raised_zeros

MOST_ROWS = 4
"""More are better multiplied by tensor cores."""

BYTES_READ = 1 << 14
"""Weights that a program reads, if outputs suffice for `PROGRAMS`."""

PROGRAMS = 256
"""Two for each multiprocessor."""

HELD_BYTES = 1 << 15
"""Weights that a program keeps in registers while it waits: 64 registers of every thread."""

PIECES = tl.constexpr(128)
"""A chunk of an output has a piece for every thread."""

LARGEST_PIECE = 8
"""Bytes: that many elements of x, of 16 bits, come in one load."""


@triton.jit
def _with(items, item):
    return items + (item,)  # noqa: RUF005  # Triton knows sums of tuples, and no unpacking


@triton.jit
def _read_scales(
    scales,
    zeros,
    output,
    offset,
    OUTPUTS: tl.constexpr,
    SETS: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """Scales [TILE] and zeros [1, TILE] of each set of outputs, if one is for all inputs; otherwise they mean nothing."""
    partial_sums = ()
    for s in tl.static_range(SETS):
        scale, zero = 1.0, 0.0
        if GROUPS == 1:
            scale = tl.load(scales + output + s * OUTPUTS + offset)
            zero = raised_zeros(zeros, output + s * OUTPUTS, offset[None, :], BITS, ZEROS)
        partial_sums = _with(partial_sums, (scale, zero))
    return partial_sums


@triton.jit
def _read(
    source,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SETS: tl.constexpr,
    NORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """Of one chunk the bytes [PIECES, TILE, size], scales and zeros [PIECES, TILE] of each set of outputs; and the weights of the
    norm [PIECES, size] for each half of its bytes.

    Args:
        source: (numbers, scales and zeros of the weight, weight of the norm, result of `_read_scales`, first output of the
            program, offsets of its outputs from that).
    """
    weight, scales, zeros, norm_weight, of_outputs, output, offset = source
    FIRST: tl.constexpr = CHUNKS[CHUNK][0]
    SIZE: tl.constexpr = CHUNKS[CHUNK][1]
    WIDTH: tl.constexpr = INPUTS * BITS // 8
    piece = tl.arange(0, PIECES) * SIZE
    byte = piece[:, None] + tl.arange(0, SIZE)[None, :]
    if FIRST + PIECES * SIZE > WIDTH:  # what is repeated meets zeros
        piece, byte = tl.minimum(piece, WIDTH - FIRST - 1), tl.minimum(byte, WIDTH - FIRST - 1)
    sets = ()
    for s in tl.static_range(SETS):
        first = (output + s * OUTPUTS).to(tl.int64)
        its_weight = weight + first * WIDTH
        if WIDTH % 16 == 0:
            its_weight = tl.multiple_of(its_weight, 16)  # the launch has made sure of it
        # What is known when it is compiled is added to what is the same for all: so it becomes a part of instructions.
        stored = tl.load(its_weight + FIRST + (offset[None, :, None] * WIDTH + byte[:, None, :]))
        scale, zero = of_outputs[s]
        if GROUPS > 1:
            offsets = offset[None, :] * GROUPS + ((FIRST + piece) // (WIDTH // GROUPS))[:, None]
            scale = tl.load(scales + first * GROUPS + offsets)
            zero = raised_zeros(zeros, first * GROUPS, offsets, BITS, ZEROS)
        sets = _with(sets, (stored, scale, zero))
    factors = ()
    for half in tl.static_range(8 // BITS):
        factor = 1.0
        if NORM:
            factor = tl.load(norm_weight + column_of(FIRST + byte, half, BITS))
        factors = _with(factors, factor)
    return sets, factors


@triton.jit
def _load_rows(x, residual, offsets, exists, MASKED: tl.constexpr, ADD: tl.constexpr):
    """Elements of x, or of x + residual, rounded to their dtype; as float32."""
    if not MASKED:
        exists = None
    values = tl.load(x + offsets, mask=exists).to(tl.float32)
    if ADD:
        values += tl.load(residual + offsets, mask=exists).to(tl.float32)
        values = values.to(x.dtype.element_ty).to(tl.float32)
    if MASKED:
        values = tl.where(exists, values, 0.0)
    return values


@triton.jit
def _add(
    x,
    residual,
    chunk,
    sums,
    squares,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    SETS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Sums [PIECES, TILE] of each row in each set, and sums of squares [PIECES] of each row, with a chunk in them."""
    FIRST: tl.constexpr = CHUNKS[CHUNK][0]
    SIZE: tl.constexpr = CHUNKS[CHUNK][1]
    HALVES: tl.constexpr = 8 // BITS
    MASKED: tl.constexpr = (FIRST + PIECES * SIZE) * HALVES > INPUTS
    byte = FIRST + tl.arange(0, PIECES)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    sets, factors = chunk
    rows, new_squares = (), ()
    for r in tl.static_range(ROWS):
        square = squares[r]
        for half in tl.static_range(HALVES):
            column = column_of(byte, half, BITS)
            values = _load_rows(x, residual, r * INPUTS + column, column < INPUTS, MASKED, ADD)
            if NORM:
                square += tl.sum(values * values, axis=1)
                values *= factors[half]
            rows = _with(rows, values[:, None, :])
        new_squares = _with(new_squares, square)
    new_sums = ()
    for s in tl.static_range(SETS):
        stored, scale, zero = sets[s]
        numbers = raised_numbers(stored, BITS)
        for r in tl.static_range(ROWS):
            partial_sums = tl.sum((numbers[0] - zero[:, :, None]) * rows[r * HALVES], axis=2)
            if HALVES == 2:
                partial_sums += tl.sum((numbers[1] - zero[:, :, None]) * rows[r * HALVES + 1], axis=2)
            if GROUPS > 1:
                partial_sums *= scale.to(tl.float32)
            new_sums = _with(new_sums, sums[s * ROWS + r] + partial_sums)
    return new_sums, new_squares


@triton.jit
def _finished(sums, scale, squares, eps, INPUTS: tl.constexpr, NORM: tl.constexpr, GROUPS: tl.constexpr):
    """Sums of all threads [TILE], times the scale that a whole output may have, and the norm's of the row."""
    result = tl.sum(sums, axis=0)
    if GROUPS == 1:
        result *= scale.to(tl.float32)
    if NORM:
        result *= 1.0 / tl.sqrt(tl.sum(squares, axis=0) / INPUTS + eps)
    return result


@triton.jit
def _packed_gemv_kernel(
    x,
    residual,
    norm_weight,
    weight,
    scales,
    zeros,
    bias,
    out,
    new_residual,
    eps,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNKS: tl.constexpr,
    HELD: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    ZEROS: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Program i: outputs [i * TILE, (i + 1) * TILE) of all rows, and the gates before them. CHUNKS are (first byte, bytes of a
    piece); HELD of them are loaded before the first is multiplied.
    """
    dependent.start(LAUNCH)
    SETS: tl.constexpr = 2 if GATE else 1
    output, offset = tl.program_id(0) * TILE, tl.arange(0, TILE)
    if OUTPUTS % TILE:
        offset = tl.minimum(offset, OUTPUTS - 1 - output)  # what is too much repeats the last one
    of_outputs = _read_scales(scales, zeros, output, offset, OUTPUTS, SETS, BITS, GROUPS, ZEROS)
    source = (weight, scales, zeros, norm_weight, of_outputs, output, offset)
    chunks = ()
    for i in tl.static_range(HELD):
        chunk = _read(source, CHUNKS, i, INPUTS, OUTPUTS, SETS, NORM, BITS, GROUPS, ZEROS)
        chunks = _with(chunks, chunk)
    dependent.wait(LAUNCH)

    sums, squares = (), ()
    for _ in tl.static_range(SETS * ROWS):
        sums = _with(sums, tl.zeros([PIECES, TILE], tl.float32))
    for _ in tl.static_range(ROWS):
        squares = _with(squares, tl.zeros([PIECES], tl.float32))
    for i in tl.static_range(len(CHUNKS)):
        if i + HELD < len(CHUNKS):
            chunk = _read(source, CHUNKS, i + HELD, INPUTS, OUTPUTS, SETS, NORM, BITS, GROUPS, ZEROS)
            chunks = _with(chunks, chunk)
        sums, squares = _add(
            *(x, residual, chunks[i], sums, squares, CHUNKS, i),
            *(INPUTS, ROWS, SETS, ADD, NORM, BITS, GROUPS),
        )

    column = output + tl.arange(0, TILE)
    for r in tl.static_range(ROWS):
        result = _finished(sums[r], of_outputs[0][0], squares[r], eps, INPUTS, NORM, GROUPS)
        if GATE:
            up = _finished(sums[ROWS + r], of_outputs[1][0], squares[r], eps, INPUTS, NORM, GROUPS)
            result = gated(result, up, ACTIVATION)
        if BIAS:
            result += tl.load(bias + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)
        tl.store(out + r * OUTPUTS + column, result.to(out.dtype.element_ty), mask=column < OUTPUTS)
    if ADD and tl.program_id(0) == 0:  # not over the residual: other programs still read it
        _store_total(x, residual, new_residual, ROWS * INPUTS)


@triton.jit
def _store_total(x, residual, new_residual, COUNT: tl.constexpr, BLOCK: tl.constexpr = 1024):
    """x + residual, of so many elements."""
    for first in range(0, COUNT, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        values = _load_rows(x, residual, offsets, offsets < COUNT, MASKED=True, ADD=True)
        tl.store(new_residual + offsets, values.to(x.dtype.element_ty), mask=offsets < COUNT)


def packed_gemv(x: Tensor, weight: PackedWeight, fusion: Fusion) -> tuple[Tensor, Tensor]:
    """A product of 1 to 4 rows, and what is fused with it.

    x + residual is rounded to the dtype of x; its norm, the numbers of the weight and gates are not rounded.

    Args:
        x: [num_rows, inputs], at most `MOST_ROWS` rows.
        weight: [outputs, inputs]; for gates those of the gates, and then those of what they are multiplied with.

    Returns:
        [num_rows, outputs], or half as wide for gates; and x + residual, or x if there is no residual.
    """
    num_rows, inputs = x.shape
    outputs = weight.shape[0] // fusion.sets
    assert num_rows <= MOST_ROWS
    assert weight.numbers.data_ptr() % 16 == 0
    x = x.contiguous()
    out, total = fusion.results(x, outputs)
    if not num_rows:
        return out, total
    bits, groups, has_zeros = weight.form
    chunks = _chunks(inputs * bits // 8)
    most = _most_outputs(num_rows, has_groups=groups > 1) // fusion.sets
    tile = _tile(inputs * bits // 8 * fusion.sets, outputs, most)
    held = HELD_BYTES // (LARGEST_PIECE * PIECES.value * tile * fusion.sets)
    _packed_gemv_kernel[(triton.cdiv(outputs, tile),)](
        *fusion.arguments(x, out, total, weight.numbers, weight.scales, weight.zeros),
        INPUTS=inputs,
        OUTPUTS=outputs,
        ROWS=num_rows,
        TILE=tile,
        CHUNKS=chunks,
        HELD=max(1, min(held, len(chunks))),
        **fusion.before(),
        **fusion.behind(),
        BITS=bits,
        GROUPS=groups,
        ZEROS=has_zeros,
        num_warps=PIECES.value // 32,
    )
    return out, total


def _most_outputs(rows: int, *, has_groups: bool) -> int:
    """Outputs of a program, gates among them, for which there are registers: rows and the scales of groups take some, too."""
    return (8 if has_groups else 16) if rows <= 2 else (2 if has_groups else 4)


def _tile(width: int, outputs: int, most: int) -> int:
    """Outputs of a program, a power of two, where each has so many bytes, with its gate."""
    wanted = min(BYTES_READ / width, outputs // PROGRAMS, most)
    return 1 << round(math.log2(max(wanted, 1)))


def _chunks(width: int) -> tuple[tuple[int, int], ...]:
    """Of an output of so many bytes: where each chunk begins, and the bytes of a piece of it, which are a power of two.

    A thread has the same piece of all outputs of a program, so that no other one needs its elements of x.
    """
    partial_sums, first, size = list[tuple[int, int]](), 0, LARGEST_PIECE
    while first < width:
        left = triton.cdiv(width - first, PIECES.value)
        size = min(size, 1 << left.bit_length() - 1)
        partial_sums.append((first, size))
        first += size * PIECES.value
    return tuple(partial_sums)
