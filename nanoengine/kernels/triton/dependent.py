"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits where it needs what that writes.

The rules (CUDA programming guide, "Programmatic Dependent Launch"; compute capability 9.0 and later). Before its wait, a kernel
may

1. read constants: weights, norms, tables of angles;
2. read what is older than the kernel before, but only if that kernel lets the next one start behind its wait;
3. prefetch anything;
4. write nothing.

Every launch has a program that waits: otherwise it could end before the kernel before it does, and the wait of the next one
would say nothing of that. A kernel that does not wait is launched normally, behind everything before it.

`LAUNCH` of a kernel is one of the three below. With LAUNCH_EARLY a kernel lets the next one start at once, so that more weights
are on their way at the same time: then rule 2 does not hold for the next one. Only products do that, and what follows a product
obeys.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra import cuda

LAUNCH_PLAIN, LAUNCH_DEPENDENT, LAUNCH_EARLY = 0, 1, 2
LATE = 4
"""Added to LAUNCH: after its wait the kernel does nothing for a while. A kernel behind it that reads too early then reads what is
old: `benchmarks/gpu/choose.py` looks for that."""


@triton.jit
def start(LAUNCH: tl.constexpr):
    """First of all in a kernel."""
    if LAUNCH % 4 == 2:
        cuda.gdc_launch_dependents()


@triton.jit
def wait(LAUNCH: tl.constexpr):
    """Before the first read of what the kernels before have written, and before the first write."""
    if LAUNCH:
        cuda.gdc_wait()
        if LAUNCH % 4 == 1:
            cuda.gdc_launch_dependents()
        if LAUNCH >= 4:  # 20 microseconds
            tl.inline_asm_elementwise(
                "nanosleep.u32 20000; mov.u32 $0, 0;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
            )


def options(launch: int) -> dict[str, Any]:
    """Options of a launch of that kind, besides LAUNCH."""
    return {"launch_pdl": True} if launch else {}
