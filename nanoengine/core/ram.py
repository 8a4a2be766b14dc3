"""How much memory of the machine this process can still take."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where control groups, version 2, say what a container may use."""


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
