"""Limits of control groups, of version 2 or 1, for this process: each limit on the path to the root counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path, PurePosixPath

GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""The folder of all groups, and the list of the groups of this process."""

QUOTAS = "cpu.max", "cpu.cfs_quota_us cpu.cfs_period_us"
"""Files with a quota of CPU time and its period, both in microseconds."""


def limits(controller: str, *kinds: str) -> Iterator[tuple[Path, int, int]]:
    """The limits of a controller ("memory", "cpu"), from the process's group up to the root: each with its folder and the two
    numbers in the files of one of `kinds`. Groups without such files, or whose limit is "max", are left out. (In a container the
    path may be the host's: its folders are not there, and the root is the container's group.)
    """
    with suppress(OSError):
        for _, names, path in (line.split(":", 2) for line in MEMBERSHIP.read_text().splitlines()):
            group, top = PurePosixPath(path.lstrip("/")), GROUPS / controller if names else GROUPS
            folders = (group, *group.parents) if not names or controller in names.split(",") else ()
            for folder, files in product((top / each for each in folders), map(str.split, kinds)):
                with suppress(OSError, ValueError):
                    limit, other = (int(word) for name in files for word in (folder / name).read_text().split())
                    yield folder, limit, other


def within_quota(num_threads: int) -> int:
    """The number of threads that the quotas of CPU time let run all the time, from 1 to `num_threads`."""
    quotas = (quota // period for _, quota, period in limits("cpu", *QUOTAS) if quota > 0)  # -1: none
    return max(1, min([num_threads, *quotas]))
