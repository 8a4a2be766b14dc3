"""How much memory this process can still take, as the system's files tell it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from nanoengine import cgroups, ram
from nanoengine.ram import available_ram

GIB = 2**30


def fake_files(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """Let the system's memory files have this content; those not named do not exist."""

    def read_text(path: Path, *_: object, **__: object) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(ram.Path, "read_text", read_text)


MEMINFO = {"/proc/meminfo": "MemTotal:       33554432 kB\nMemFree: 1 kB\nMemAvailable:   16777216 kB\n"}


def cgroup(limit: str, used: int, active_file: int = 0, inactive_file: int = 0) -> dict[str, str]:
    stat = f"anon 5\nfile 7\ninactive_anon 11\ninactive_file {inactive_file}\nactive_file {active_file}\nslab 13\n"
    files = {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}
    return {str(cgroups.MEMBERSHIP): "0::/\n"} | {str(cgroups.GROUPS / name): files[name] for name in files}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MEMINFO, 16 * GIB),
        (MEMINFO | cgroup("max", 5 * GIB), 16 * GIB),
        (MEMINFO | cgroup(str(8 * GIB), 3 * GIB), 5 * GIB),  # the container has less than the machine
        (MEMINFO | cgroup(str(64 * GIB), 3 * GIB), 16 * GIB),  # the machine has less than the container may take
        (MEMINFO | cgroup(str(2 * GIB), 3 * GIB), 0),  # over its limit
        (MEMINFO | cgroup(str(8 * GIB), 7 * GIB, 2 * GIB, 3 * GIB), 6 * GIB),  # cached files make room for others
        (MEMINFO | cgroup(str(64 * GIB), 63 * GIB, 30 * GIB, 30 * GIB), 16 * GIB),
        (MEMINFO | cgroup("max", 5 * GIB, 2 * GIB, 3 * GIB), 16 * GIB),
    ],
)
def test_available_ram_is_the_machines_or_the_containers(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    fake_files(monkeypatch, files)
    assert available_ram() == expected


@pytest.mark.parametrize("meminfo", [{}, {"/proc/meminfo": "MemTotal: 33554432 kB\n"}])
def test_available_ram_without_meminfo_is_half_of_the_physical(
    monkeypatch: pytest.MonkeyPatch, meminfo: dict[str, str]
) -> None:
    fake_files(monkeypatch, meminfo)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert available_ram() == 1000 * 4096 // 2


def test_a_limit_of_address_space_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ulimit -v`: what the process has mapped is taken already."""
    fake_files(monkeypatch, MEMINFO | {"/proc/self/statm": "1000 500 20 10 0 300 0\n"})
    used = 1000 * resource.getpagesize()
    for limit, expected in ((resource.RLIM_INFINITY, 16 * GIB), (GIB, GIB - used), (64 * GIB, 16 * GIB), (100, 0)):
        monkeypatch.setattr(ram.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert available_ram() == expected
