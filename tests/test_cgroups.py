"""Limits of memory and of CPU time in drawn trees of control groups: of those above the process the least counts."""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanoengine import cgroups
from nanoengine.builder import read_config
from nanoengine.cgroups import within_quota
from nanoengine.core.startup import Startup
from nanoengine.kernels.capability import NativeAndTriton
from nanoengine.ram import available_ram
from nanoengine.scale.replicas.capability import config_of_each

GIB = 2**30
NO_LIMIT = 9223372036854771712
"""What a group of version 1 says that has none."""

Tree = tuple[Path, Path]
"""The folder of all groups, and the list of those of the process."""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    groups, membership = tmp_path / "groups", tmp_path / "membership"
    monkeypatch.setattr(cgroups, "GROUPS", groups)
    monkeypatch.setattr(cgroups, "MEMBERSHIP", membership)
    membership.write_text("0::/\n")
    return groups, membership


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def memory(rng: random.Random, folder: Path, version: int) -> float:
    """Draw the limit of a group; returns the bytes that it leaves."""
    limit, used, cached = rng.randrange(GIB), rng.randrange(GIB), rng.randrange(GIB // 2)
    active = rng.randrange(cached + 1)
    stat = f"anon 5\n{{0}}inactive_file {cached - active}\n{{0}}active_file {active}"
    if version == 2:
        hard, soft = (rng.choice((limit, "max")) for _ in range(2))
        write(folder, memory__max=hard, memory__high=soft, memory__current=used, memory__stat=stat.format(""))
        is_limited = limit in (hard, soft)
    else:
        is_limited = rng.random() < 0.7
        shown = stat.format("total_") + "\ninactive_file 1\nactive_file 2" if rng.random() < 0.7 else stat.format("")
        bound = limit if is_limited else NO_LIMIT
        write(folder, memory__limit_in_bytes=bound, memory__usage_in_bytes=used, memory__stat=shown)
    return max(limit - used + cached, 0) if is_limited else math.inf


def cpu(rng: random.Random, folder: Path, version: int) -> float:
    """Draw the quota of a group; returns the CPUs that it pays for."""
    period, cpus, is_limited = rng.choice((10_000, 100_000)), rng.choice((0.1, 1, 1.9, 2, 3.5, 64)), rng.random() < 0.7
    quota = int(period * cpus)
    if version == 2:
        write(folder, cpu__max=f"{quota if is_limited else 'max'} {period}")
    else:
        write(folder, cpu__cfs_quota_us=quota if is_limited else -1, cpu__cfs_period_us=period)
    return max(1, int(cpus)) if is_limited else math.inf


def draw(rng: random.Random, tree: Tree, controller: str, group: Callable[[random.Random, Path, int], float]) -> float:
    """Draw a tree, with limits of this controller; returns the least that is left to the process."""
    groups, membership = tree
    shutil.rmtree(groups, ignore_errors=True)
    membership.unlink(missing_ok=True)  # to write over a file takes longer
    version, depth = rng.choice((1, 2)), rng.randrange(5)
    path = [f"level {number}: a name" for number in range(depth)]
    root = groups / controller if version == 1 else groups
    is_hidden = rng.random() < 0.2  # in a container that sees the host's path, and its own group as the root
    left = math.inf
    for number in range(1 if is_hidden else depth + 1):
        folder = root.joinpath(*path[:number])
        if rng.random() < 0.8:
            left = min(left, group(rng, folder, version))
        if path:
            group(rng, folder / "of another", version)
    group(rng, groups / "pids" / "group", version)
    joined = "/" + "/".join(path)
    names = rng.choice((controller, f"{controller},more", f"more,{controller}"))
    lines = [f"0::{joined}"] if version == 2 else [f"5:{names}:{joined}", "0::/"]
    membership.write_text("\n".join(["7:pids:/group", *lines, "1:name=systemd:/of another"]) + "\n")
    return left


@pytest.mark.parametrize("seed", range(3))
def test_the_least_limit_of_memory_above_the_process_counts(tree: Tree, seed: int) -> None:
    rng, seen = random.Random(seed), 0
    for _ in range(60):
        shutil.rmtree(tree[0], ignore_errors=True)
        tree[1].unlink(missing_ok=True)
        without = available_ram()
        left = draw(rng, tree, "memory", memory)
        seen += left < without
        assert available_ram() == left if left < without // 2 else available_ram() > without // 2
    assert seen > 20


@pytest.mark.parametrize("seed", range(3))
def test_the_least_quota_of_cpu_time_above_the_process_counts(tree: Tree, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        left = draw(rng, tree, "cpu", cpu)
        for count in (1, 2, 8):
            assert within_quota(count) == min(left, count)


def test_what_is_no_group_of_ours_limits_nothing(tree: Tree) -> None:
    groups, membership = tree
    assert within_quota(5) == 5, "there are no groups"
    membership.unlink()
    assert within_quota(5) == 5
    for content in ("", "max", "max 100000", "-1 100000", "x y"):
        write(groups, cpu__max=content)
        membership.write_text("0::/../../of the host\n")
        assert within_quota(5) == 5


def test_a_quota_decides_the_threads_of_an_engine_and_of_its_replicas(tree: Tree) -> None:
    startup, before = Startup(read_config("demo", {"device": "cpu"})), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for quota, expected in ((150_000, 1), (200_000, 2), (900_000, 3)):
            write(tree[0], cpu__max=f"{quota} 100000", memory__max=5000, memory__current=1000)
            device = NativeAndTriton().device(startup)
            assert (device.num_threads, device.available()) == (expected, 4000)
    finally:
        torch.set_num_threads(before)
    write(tree[0], cpu__max="200000 100000")
    each = config_of_each(read_config("demo", {"replicas": 2}), 101, has_gpus=False)
    assert each.num_threads == max(1, min(2, len(os.sched_getaffinity(0))) // 2)
