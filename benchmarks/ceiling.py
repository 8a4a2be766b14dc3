"""What the device can do at best, measured: reading memory, and multiplying matrices."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from benchmarks.limit import Ceiling


def measure_ceiling(device: torch.device, dtype: torch.dtype, repetitions: int = 3) -> Ceiling:
    """The best of a few reads of a large tensor, and of a few large products."""
    on_gpu = device.type == "cuda"
    num_bytes = 4 << 30 if on_gpu else 1 << 30
    read = num_bytes / _best_seconds(torch.zeros(num_bytes // 4, dtype=torch.int32, device=device).max, repetitions)
    rows, inner, columns = (8192, 8192, 8192) if on_gpu else (1024, 4096, 4096)
    left = torch.randn(rows, inner, device=device).to(dtype)
    right = torch.randn(columns, inner, device=device).to(dtype)
    flop = 2 * rows * inner * columns / _best_seconds(lambda: (left @ right.T)[0, 0], repetitions)
    return Ceiling(read, flop)


def _best_seconds(compute: Callable[[], torch.Tensor], repetitions: int) -> float:
    def seconds() -> float:
        start = perf_counter()
        compute().item()  # waits for the device
        return perf_counter() - start

    with torch.inference_mode():
        compute()
        return min(seconds() for _ in range(repetitions))
