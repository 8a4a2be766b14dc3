"""Which outputs of a layer with states are computed here: all; ranks have some (tests/scale/parallel/test_partition.py)."""

from __future__ import annotations

import torch

from nanoengine.models.layers.state_partition import ProjectionPart, StatePartition
from nanoengine.models.model_config import StateConfig

FACTS = StateConfig(taps=4, channels=16, num_heads=4, num_groups=2, depth=2, width=2)
KEYS, VALUES = ProjectionPart("groups", 2), ProjectionPart("heads", 2)


def test_all_is_computed_here() -> None:
    partition = StatePartition(FACTS)
    assert partition.rows(KEYS, KEYS, VALUES, ProjectionPart("heads")) == [
        range(4),
        range(4, 8),
        range(8, 16),
        range(16, 20),
    ]
    whole = torch.arange(32).view(2, 16)
    assert partition.pick(whole, KEYS, KEYS, VALUES) is whole
    assert partition.gather(whole, VALUES) is whole


def test_some_heads_and_their_groups() -> None:
    partition = StatePartition(FACTS)
    partition.local = {"heads": range(2, 4), "groups": range(1, 2), "channels": range(16)}
    assert partition.rows(KEYS, KEYS, VALUES) == [range(2, 4), range(6, 8), range(12, 16)]
    assert partition.pick(torch.arange(16), KEYS, KEYS, VALUES).tolist() == [2, 3, 6, 7, 12, 13, 14, 15]
