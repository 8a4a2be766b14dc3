"""How much memory this process can still take, as the system's files tell it. Control groups: tests/test_cgroups.py."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from nanoengine import ram
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


@pytest.mark.parametrize("meminfo", [{}, {"/proc/meminfo": "MemTotal: 33554432 kB\n"}])
def test_available_ram_without_meminfo_is_half_of_the_physical(
    monkeypatch: pytest.MonkeyPatch, meminfo: dict[str, str]
) -> None:
    fake_files(monkeypatch, meminfo)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert available_ram() == 1000 * 4096 // 2


def test_available_ram_is_the_machines_or_what_a_limit_of_address_space_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ulimit -v`: what the process has mapped is taken already."""
    fake_files(monkeypatch, MEMINFO | {"/proc/self/statm": "1000 500 20 10 0 300 0\n"})
    used = 1000 * resource.getpagesize()
    for limit, expected in ((resource.RLIM_INFINITY, 16 * GIB), (GIB, GIB - used), (64 * GIB, 16 * GIB), (100, 0)):
        monkeypatch.setattr(ram.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert available_ram() == expected
