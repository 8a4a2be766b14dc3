"""Several engines in one process: what one gives back when it is closed, nothing of another may use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.modes import FASTEST, running_in
from tests.gpu.engines import DEVICE, Tokens, generate, open_llm, requests
from tests.gpu.marks import needs_gpu
from tests.support import model_runner

pytestmark = needs_gpu

GARBAGE = 1 << 30
"""Bytes that are taken and overwritten: much more than an engine on the tiny model has given back."""


def spoil_free_memory() -> None:
    """Whoever reads or runs in memory that was given back, will show."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    pieces = [torch.full((size,), 255, dtype=torch.uint8, device=DEVICE) for size in [GARBAGE, *[1 << 20] * 64]]
    torch.cuda.synchronize()
    del pieces
    torch.cuda.empty_cache()


@pytest.mark.parametrize("closed_before", [False, True], ids=["while the other runs", "before the other begins"])
def test_graphs_of_an_engine_outlive_another(checkpoint: Path, expected: Tokens, closed_before: bool) -> None:
    first = open_llm(checkpoint, max_num_seqs=32)
    assert model_runner(first).recorder is not None
    assert generate(first, *requests()) == expected
    if closed_before:
        first.close()
        spoil_free_memory()
    with open_llm(checkpoint) as second:
        assert model_runner(second).recorder is not None
        for _ in range(2):
            second.reset_prefix_cache()
            with running_in(second, FASTEST):
                assert generate(second, *requests()) == expected
            first.close()
            spoil_free_memory()
