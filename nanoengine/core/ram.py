"""How much memory of the machine this process can still take."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where control groups, version 2, say what a container may use."""


def available_ram() -> int:
    """Bytes of RAM that this process can still take: of the machine, or of its container or own limit where that has less."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    with suppress(OSError, KeyError):
        available = _table(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    with suppress(OSError, ValueError):  # there are no control groups, or this one has no limit: "max"
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = _table(CGROUP / "memory.stat")
        # Cached files count as used, but are given back on demand.
        file_cache = stat.get("inactive_file", 0) + stat.get("active_file", 0)
        available = min(available, max(limit - used + file_cache, 0))
    with suppress(OSError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        if (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:  # `ulimit -v`
            available = min(available, max(limit - used, 0))
    return available


def _table(path: Path) -> dict[str, int]:
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines())}
