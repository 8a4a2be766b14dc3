"""StatePartition: heads, groups and channels of a layer with states that belong to this rank, and their rows in projections. A
group is the heads with the same queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nanoengine.models.model_config import StateConfig

Unit = Literal["heads", "groups", "channels"]


class ProjectionPart(NamedTuple):
    """Adjacent outputs of a projection: `width` for each unit."""

    unit: Unit
    width: int = 1


class StatePartition:
    """The partition without ranks: all of it. A rank has heads with their groups, or channels (`scale/parallel/states.py`)."""

    def __init__(self, facts: StateConfig):
        self.facts = facts
        counts: Mapping[Unit, int]
        counts = {"heads": facts.num_heads, "groups": facts.num_groups, "channels": facts.channels}
        self.all: Mapping[Unit, range] = {unit: range(count) for unit, count in counts.items()}
        self.local = self.all
        self.has_whole_groups = True
        """Whether each group is on one rank."""

    def count(self, unit: Unit) -> int:
        """The number of units of this rank."""
        return len(self.local[unit])

    def rows(self, *parts: ProjectionPart) -> list[range]:
        """Ranges of this rank in the concatenated outputs of parts."""
        ranges, at = [], 0
        for unit, width in parts:
            units = self.local[unit]
            ranges.append(range(at + units.start * width, at + units.stop * width))
            at += len(self.all[unit]) * width
        return ranges

    def pick(self, whole: Tensor, *parts: ProjectionPart) -> Tensor:
        """[..., all outputs of parts] -> [..., outputs of this rank]; `whole` itself without ranks."""
        ranges = self.rows(*parts)
        if sum(map(len, ranges)) == whole.shape[-1]:
            return whole
        return torch.cat([whole[..., columns.start : columns.stop] for columns in ranges], dim=-1)

    def gather(self, local: Tensor, part: ProjectionPart) -> Tensor:
        """[n, outputs of a part on this rank] -> [n, all outputs of the part]."""
        return local
