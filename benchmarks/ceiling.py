"""What the device can do at best, measured: reading memory, and multiplying matrices."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from benchmarks.limit import Ceiling


def measure_ceiling(device: torch.device, dtype: torch.dtype, repetitions: int = 3) -> Ceiling:
    """The best of a few reads of a large tensor, and of a few large products: in the dtype, or in float32 if that is faster."""
    on_gpu = device.type == "cuda"
    num_bytes = 4 << 30 if on_gpu else 1 << 30
    read = num_bytes / _best_seconds(torch.zeros(num_bytes // 4, dtype=torch.int32, device=device).max, repetitions)
    shape = (8192, 8192, 8192) if on_gpu else (1024, 4096, 4096)
    faster = torch.float32 if is_slower_than_float32(device, dtype) else dtype
    return Ceiling(read, _flop_rate(device, faster, shape, repetitions))


def is_slower_than_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies a dtype more slowly than float32, as CPUs do that have no instructions for it.

    Seen from small products: at its slowest, a large one takes half a minute.
    """
    if dtype is torch.float32 or device.type == "cuda":
        return False
    ours, full = (_flop_rate(device, each, (64, 1024, 1024), 3) for each in (dtype, torch.float32))
    return ours < full


def _flop_rate(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], repetitions: int) -> float:
    rows, inner, columns = shape
    left = torch.randn(rows, inner, device=device).to(dtype)
    right = torch.randn(columns, inner, device=device).to(dtype)
    return 2 * rows * inner * columns / _best_seconds(lambda: (left @ right.T)[0, 0], repetitions)


def _best_seconds(compute: Callable[[], torch.Tensor], repetitions: int) -> float:
    def seconds() -> float:
        start = perf_counter()
        compute().item()  # waits for the device
        return perf_counter() - start

    with torch.inference_mode():
        compute()
        return min(seconds() for _ in range(repetitions))
