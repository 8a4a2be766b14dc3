"""What machine this is, and whether it was quiet."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

from nanoengine.kernels.native.target import wanted_target

PROC_STAT = Path("/proc/stat")
BUSY = 0.15  # cores of other processes from which figures are in doubt


def machine_facts() -> dict[str, Any]:
    packages = ("nanoengine", "torch", "transformers", "numpy")
    return {
        "versions": {name: _version(name) for name in packages} | {"python": platform.python_version()},
        "cpu": _cpu_name(),
        "cpu_target": wanted_target(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


class OtherLoad:
    """Watches how many cores other processes use, from its making on."""

    def __init__(self) -> None:
        self._start = perf_counter()
        self._other_before = self._other_seconds()

    def cores(self) -> float | None:
        """Mean since the start; None where the system does not say."""
        other = self._other_seconds()
        if other is None or self._other_before is None:
            return None
        return max((other - self._other_before) / (perf_counter() - self._start), 0.0)

    def _other_seconds(self) -> float | None:
        """CPU seconds of everyone but this process and its finished children."""
        if not PROC_STAT.exists():
            return None
        user, nice, system, _, _, irq, softirq, steal = map(int, PROC_STAT.read_text().split(maxsplit=9)[1:9])
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return busy - sum(os.times()[:4])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # as when the sources are run without being installed
        return "not installed"
