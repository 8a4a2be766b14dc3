"""How long work takes a device, and the host to launch it; and what the device can do at best."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from time import perf_counter
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.limit import Ceiling

SIZES = {"cuda": (4 << 30, 8192), "cpu": (16 << 20, 256)}
"""Bytes that are read and copied, and rows and columns of the matrices, for the best that a device can do."""


REPEATS = 5
"""Of each of these."""

WARM_UPS = 3
"""Runs before those that are timed: kernels are compiled then."""


def record(device: torch.device, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Work as a CUDA graph, which returns the same tensor each time; itself, where there is no GPU."""
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work()  # compiles kernels, which a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        result = work()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


@torch.inference_mode()
def seconds(device: torch.device, work: Callable[[], object], repeats: int) -> float:
    """Median of single runs; on a GPU by events."""
    for _ in range(WARM_UPS if repeats > 1 else 1):
        work()
    if device.type != "cuda":
        return statistics.median(_on_host(work) for _ in range(repeats))
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1000


def _on_host(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def launch_seconds(work: Callable[[], object], repeat: int) -> float:
    """What the host takes to launch some work, in the mean; the device may still be at it then."""
    start = perf_counter()
    for _ in range(repeat):
        work()
    return (perf_counter() - start) / repeat


@dataclass(frozen=True)
class Rates:
    """The best that a device was seen to do: bytes per second of a read, of a copy (read and written), and multiplications."""

    read_bytes_s: float
    copy_bytes_s: float
    flop_s: float

    @property
    def bytes_s(self) -> float:
        """Bytes moved per second, whichever way is the faster."""
        return max(self.read_bytes_s, self.copy_bytes_s)

    @property
    def ceiling(self) -> Ceiling:
        return Ceiling(self.bytes_s, self.flop_s)

    @property
    def figures(self) -> dict[str, float]:
        return {
            "read_gb_s": self.read_bytes_s / 1e9,
            "copy_gb_s": self.copy_bytes_s / 1e9,
            "matmul_tflop_s": self.flop_s / 1e12,
        }


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """A large read, a large copy, and a large product of random matrices (of zeros it would be faster than of anything else)."""
    num_bytes, side = SIZES[device.type]
    source = torch.randint(0, 1000, (num_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    read = num_bytes / seconds(device, source.max, REPEATS)
    copy = 2 * num_bytes / seconds(device, lambda: target.copy_(source), REPEATS)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return Rates(read, copy, 2 * side**3 / seconds(device, lambda: left @ right.T, REPEATS))


def device_facts(device: torch.device) -> dict[str, Any]:
    """What figures depend on. The package need not be installed for it: on a lent machine it is run from its sources."""
    facts = {"date": date.today().isoformat(), "device": str(device), "cores": len(os.sched_getaffinity(0))}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if device.type == "cuda":
        import triton

        versions |= {"triton": triton.__version__, "cuda": str(torch.version.cuda)}
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts | {"versions": versions}
