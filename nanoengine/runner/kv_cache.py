"""KVCache: the tensors that hold K and V of every layer, and how many blocks of them the machine has room for."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from nanoengine.attention.backend import AttentionBackend, KVLayer
from nanoengine.config import ModelConfig
from nanoengine.kernels.memory import zeros_in_huge_pages

CPU_CAP = 4 << 30
"""Most bytes of KV that a CPU engine takes unasked; `kv_cache_memory` asks for more."""

CPU_SHARE = 0.5
"""Share of the available RAM that a CPU engine takes at most unasked; the rest is for weights' copies and other programs."""

HOST_SHARE = 0.25
"""Share of the available RAM that swapped blocks take at most unasked."""

CGROUP = Path("/sys/fs/cgroup")
"""Where control groups, version 2, say what a container may use."""


class KVCache:
    """K and V of every layer for `num_blocks` usable blocks and the null block.

    `layers[i]` is (K, V) of layer i, each of the backend's shape. Their content is unset: nothing may read a slot before it
    was written.
    """

    def __init__(
        self, num_blocks: int, model: ModelConfig, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
    ):
        _, *shape = backend.kv_shape(num_blocks + 1, model.num_kv_heads, model.head_dim)
        if backend.block_major:
            pool = _new((num_blocks + 1, model.num_layers, 2, *shape), dtype, device)
            self.layers: list[KVLayer] = [(pool[:, i, 0], pool[:, i, 1]) for i in range(model.num_layers)]
        else:
            pool = _new((model.num_layers, 2, num_blocks + 1, *shape), dtype, device)
            self.layers = [(pool[i, 0], pool[i, 1]) for i in range(model.num_layers)]

    def fill(self, value: float) -> None:
        """Set every slot, the null block's too. Tests fill a pool with NaN to see that nobody reads what nobody wrote."""
        for k, v in self.layers:
            k.fill_(value)
            v.fill_(value)


def _new(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return zeros_in_huge_pages(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)  # FlashAttention-3 multiplies what nobody wrote by 0


def available_ram() -> int:
    """Bytes of RAM that this process can still take: of the machine, or of its container where that has less."""
    available = _meminfo_available() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return available
    if limit == "max":
        return available
    # Cached files count as used, but are given back on demand.
    file_cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    return min(available, max(int(limit) - used + file_cache, 0))


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kilobytes is None else int(kilobytes) * 1024


def cpu_kv_bytes() -> int:
    """Bytes for the KV pool on the CPU when the user names none."""
    return int(min(CPU_CAP, CPU_SHARE * available_ram()))


def host_kv_bytes() -> int:
    """Bytes of host memory for swapped blocks when the user names none."""
    return int(min(CPU_CAP, HOST_SHARE * available_ram()))


def gpu_kv_bytes(total: int, free: int, utilization: float, needed: int) -> int:
    """Bytes for the KV pool on a GPU.

    Args:
        total: memory of the device.
        free: what nobody uses now; all the rest counts as used, by other processes too.
        utilization: share of `total` that may be used in the end.
        needed: bytes that steps of full size take beyond what is in use now.
    """
    return int(total * utilization) - (total - free) - needed
