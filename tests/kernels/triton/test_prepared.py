"""Draws that are made again launch what was launched, and choose what a new draw would."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanoengine.kernels.triton import prepared
from nanoengine.kernels.triton.draws.repeated import MOST_KEPT, RepeatedDraws
from nanoengine.kernels.triton.draws.sampling import choose_tokens
from tests.kernels.sampled_rows import DEVICE, Rows

ROOT = Path(__file__).parents[3]
FILTERED = {"temperature": 0.8, "top_k": 9, "top_p": 0.9}
COMPARE = """
import torch, triton
from benchmarks.host_step import Driver, Launcher
from nanoengine.core.sampling import SamplingTable
from nanoengine.kernels.triton.draws.repeated import RepeatedDraws

seen = []
def note(self, *args):
    seen.append([own.data_ptr() if isinstance(own, torch.Tensor) else own for own in args])
Launcher.__call__ = note
triton.runtime.driver.set_active(Driver())
n = 5
table = SamplingTable(torch.ones(n), torch.zeros(n).int(), torch.ones(n), torch.zeros(n), torch.zeros(n).long(), set())
rows, logits, last = torch.arange(n, dtype=torch.int32), torch.zeros(n, 3000), torch.zeros(n, dtype=torch.int64)
draws = RepeatedDraws()
first, second = (draws.choose(logits, table, rows, rows, last, 1) for _ in range(2))
assert first is second
assert len(seen) == 4
hooks = slice(6, 9)  # what a launch tells hooks, and the hooks
for ordinary, again in zip(seen[:2], seen[2:]):
    assert again[hooks] == [None] * 3
    del ordinary[hooks], again[hooks]
    assert ordinary == again
print("same")
"""


def test_draws_that_are_made_again_choose_the_same() -> None:
    """Steps of drawn sizes, of which some lie where one before lay, with other numbers there."""
    rng, draws = random.Random(0), RepeatedDraws()
    num_rows, vocab_size = 3, 700
    tables = []
    for filtered in (False, True):
        rows = Rows([FILTERED if filtered and i % 2 else {"temperature": 0.7} for i in range(num_rows)])
        tables.append(replace(rows.table(), filtering={1} if filtered else set()))
    memory = torch.empty(num_rows * vocab_size, dtype=torch.float32, device=DEVICE)
    entries = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    positions = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    for _ in range(16):
        n, table = rng.randint(1, num_rows), rng.choice(tables)
        size = vocab_size - rng.choice((0, 0, 7))
        positions += 1
        logits = memory[: n * size].view(n, size).normal_(std=3)
        last, expected_last = (torch.zeros(num_rows + 1, dtype=torch.int64, device=DEVICE) for _ in range(2))
        first = rng.choice((0, 0, num_rows - n))
        given = logits, table, entries[first : first + n], positions[first : first + n]
        expected = choose_tokens(*given, expected_last)
        assert torch.equal(draws.choose(*given, last, 0), expected)
        assert torch.equal(last, expected_last)
        assert len(draws._draws) <= MOST_KEPT


def test_a_draw_is_made_again_where_all_lies_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows([FILTERED] * 3, 0)
    given = torch.zeros(3, 100, dtype=torch.float32, device=DEVICE), rows.table(), rows.rows(), rows.rows(), None, 0
    draws = RepeatedDraws()
    assert draws.choose(*given) is draws.choose(*given)
    assert draws.choose(given[0], rows.table(), *given[2:]) is not draws.choose(*given), "another table"
    monkeypatch.setattr(prepared, "is_known", lambda: False)
    draws = RepeatedDraws()
    assert draws.choose(*given) is not draws.choose(*given), "of another Triton nobody knows how"


def test_a_launch_by_address_is_that_of_triton() -> None:
    """All that Triton's launcher is given the first time, it is given again. Nothing is launched: no GPU need be there."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}
    found = subprocess.run(
        [sys.executable, "-c", COMPARE], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert found.stdout.endswith("same\n"), found.stderr
