"""How much memory of the machine this process can still take."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

from nanoengine.core.cgroups import limits

LIMITS = "memory.max memory.current", "memory.high memory.current", "memory.limit_in_bytes memory.usage_in_bytes"
"""Files with a limit of a control group, and what it uses, in bytes; at "high" the kernel lets nothing run but its search for
memory."""


def available_ram() -> int:
    """Bytes of RAM that this process can still take: of the machine, of its control groups or by `ulimit -v`, the least."""
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2048
    available = _table(Path("/proc/meminfo")).get("MemAvailable:", half) * 1024
    for folder, limit, used in limits("memory", *LIMITS):
        # Cached files count as used, but are given back on demand; in version 1, those of groups below have names of their own.
        stat = _table(folder / "memory.stat")
        file_cache = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file"))
        available = min(available, max(limit - used + file_cache, 0))
    with suppress(OSError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        if (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:  # `ulimit -v`
            available = min(available, max(limit - used, 0))
    return available


def _table(path: Path) -> dict[str, int]:
    with suppress(OSError):
        return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines())}
    return {}
