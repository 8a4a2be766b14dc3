"""The RAM that this process can still allocate."""

from __future__ import annotations

import ctypes
import resource
import sys
from contextlib import suppress
from pathlib import Path

from nanoengine.cgroups import limits
from nanoengine.core.meminfo import free_ram, numbers_by_name

LIMITS = "memory.max memory.current", "memory.high memory.current", "memory.limit_in_bytes memory.usage_in_bytes"
"""Files with a limit of a control group, and its usage, in bytes; at "high" the kernel throttles the processes of the group."""


def available_ram() -> int:
    """Bytes of RAM that this process can still allocate: the least of the machine's, its control groups' and `ulimit -v`."""
    available = free_ram()
    for folder, limit, used in limits("memory", *LIMITS):
        # Cached files count as used, but are freed on demand; in version 1, those of groups below have other names.
        stat = numbers_by_name(folder / "memory.stat")
        file_cache = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file"))
        available = min(available, max(limit - used + file_cache, 0))
    with suppress(OSError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        if (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:  # `ulimit -v`
            available = min(available, max(limit - used, 0))
    return available


def return_freed_memory() -> None:
    """Return memory that the C library has freed and still caches to the system; it does nothing but on Linux with glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
