"""The threads of the kernels: whoever calls and however many they are, everything is computed, and once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanoengine.kernels.native.operations import NativeKernels
from tests.kernels.marks import needs_kernels
from tests.support import threads, use_threads

pytestmark = needs_kernels

WEIGHT = torch.ones(64)


@cache
def kernels() -> NativeKernels:
    return NativeKernels()


def norm(x: Tensor) -> Tensor:
    return kernels().rms_norm(x, WEIGHT, 0.0)


def draw(seed: int) -> tuple[Tensor, Tensor]:
    """Rows, and what becomes of them by one thread."""
    x = torch.randn(random.Random(seed).randint(1, 300), 64, generator=torch.Generator().manual_seed(seed))
    return x, norm(x)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_any_number_of_threads_computes_the_same(count: int) -> None:
    with threads(1):
        right = [draw(seed) for seed in range(30)]
    with threads(count):
        assert all(torch.equal(norm(x), expected) for x, expected in right)


def test_the_number_may_change_from_kernel_to_kernel() -> None:
    with threads(1):
        right = [draw(seed) for seed in range(200)]
        for seed, (x, expected) in enumerate(right):
            use_threads(random.Random(seed).randint(1, 6))
            assert torch.equal(norm(x), expected)


def test_several_may_call_at_once() -> None:
    """One has the team, the others compute alone meanwhile."""
    with threads(1):
        right = [draw(seed) for seed in range(100)]
    with threads(2), ThreadPoolExecutor(4) as pool:
        results = pool.map(norm, (x for x, _ in right))
        assert all(torch.equal(result, expected) for result, (_, expected) in zip(results, right, strict=True))


BEGINNING = """
import os, torch
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from tests.kernels.test_team import draw, norm
from tests.support import use_threads
use_threads(1)
right = [draw(seed) for seed in range(15)]
use_threads(3)
assert all(torch.equal(norm(x), expected) for x, expected in right)
"""
"""Three threads on one CPU: one that waited for another without letting it run would wait for ever."""

FORK = """
use_threads(2)
child = os.fork()
if not child:
    same = all(torch.equal(norm(x), expected) for x, expected in right)
    os._exit(0 if same and len(os.listdir("/proc/self/task")) == 2 else 1)
assert os.waitpid(child, 0)[1] == 0
assert all(torch.equal(norm(x), expected) for x, expected in right)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be held to a CPU here")
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="this system does not list threads in /proc")
def test_members_let_one_another_run_on_one_cpu_and_the_child_of_a_fork_has_a_team_of_its_own() -> None:
    command = [sys.executable, "-c", BEGINNING + FORK]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
