"""Free memory of the machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def free_ram() -> int:
    """Bytes of available RAM of the machine."""
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2048
    return numbers_by_name(Path("/proc/meminfo")).get("MemAvailable:", half) * 1024


def numbers_by_name(path: Path) -> dict[str, int]:
    """A file of the system with a name and a number in each line; empty if there is no such file."""
    with suppress(OSError):
        return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines())}
    return {}
