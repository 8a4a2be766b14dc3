"""Tensors that live at the same time never share memory; those that do not, do."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from nanoengine.kernels.recording.step_memory import ALIGNED, StepMemory


def draw(memory: StepMemory, rng: random.Random) -> Tensor:
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool])
    return memory.take(torch.empty(rng.randint(0, 4), rng.randint(1, 900), dtype=dtype))


@pytest.mark.parametrize("seed", range(5))
def test_tensors_keep_their_values_while_they_or_views_of_them_live(seed: int) -> None:
    memory, rng = StepMemory(), random.Random(seed)
    live: list[tuple[Tensor, int]] = []
    for number in range(400):
        tensor = draw(memory, rng)
        assert not tensor.numel() or tensor.data_ptr() % ALIGNED == 0
        value = number % 2 if tensor.dtype is torch.bool else number % 200
        tensor.fill_(value)
        live.append((tensor[:, 1:] if rng.random() < 0.5 else tensor, value))
        del tensor
        while len(live) > rng.randint(1, 12):
            live.pop(rng.randrange(len(live)))
        assert all((own == value).all() for own, value in live)
    assert len(memory._chunks) == 1


def test_what_is_larger_than_a_chunk_has_its_own_and_a_result_is_found_again() -> None:
    memory = StepMemory()
    large = memory.take(torch.empty(5_000_000))
    found, place = memory.view_of(large), large.data_ptr()
    large.fill_(3.0)
    del large
    assert found.data_ptr() == place
    assert found.eq(3.0).all()
    assert memory.take(torch.empty(5_000_000)).data_ptr() == place
    elsewhere = torch.ones(3)
    assert memory.view_of(elsewhere) is elsewhere
