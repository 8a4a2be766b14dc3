"""The gate of SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020), element by element."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton.launch import Launch

BLOCK = 1024
"""Columns of a program."""

NUM_WARPS = 4


@triton.jit
def _silu_and_multiply_kernel(
    gate_up: tl.tensor, out: tl.tensor, width: tl.tensor, stride: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Program (i, j): block j of row i."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    source = gate_up + row * stride + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, product.to(out.dtype.element_ty), mask=mask)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, computed in float32 and rounded once.

    Args:
        gate_up: [n, 2 * width], the gate and then what it is multiplied with; rows may have gaps.

    Returns:
        [n, width], of the same dtype.
    """
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = gate_up.new_empty(n, width)
    if out.numel():
        grid = (n, triton.cdiv(width, BLOCK))
        _silu_and_multiply_kernel[grid](gate_up, out, width, gate_up.stride(0), BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


def launches() -> list[Launch]:
    """The configurations of the kernel."""
    return [
        Launch(
            name=f"silu_and_multiply, {dtype}",
            kernel=_silu_and_multiply_kernel,
            signature={
                **dict.fromkeys(("gate_up", "out"), f"*{dtype}"),
                **dict.fromkeys(("width", "stride"), "i32"),
                "BLOCK": "constexpr",
            },
            constants={"BLOCK": BLOCK},
            num_warps=NUM_WARPS,
        )
        for dtype in ("bf16", "fp16", "fp32")
    ]
