"""Share: which heads, groups and channels of a layer with states this rank computes, and their rows in a projection. A group is
the heads that share queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nanoengine.models.model_config import StateConfig

Unit = Literal["heads", "groups", "channels"]


class Part(NamedTuple):
    """Outputs that stand side by side, as many for each unit."""

    unit: Unit
    width: int = 1


class Share:
    """All of it. A rank has some of the heads, with their groups, or some of the channels (`scale/parallel/states.py`)."""

    def __init__(self, facts: StateConfig):
        self.facts = facts
        counts: Mapping[Unit, int]
        counts = {"heads": facts.num_heads, "groups": facts.num_groups, "channels": facts.channels}
        self.all: Mapping[Unit, range] = {unit: range(count) for unit, count in counts.items()}
        self.own = self.all
        self.has_whole_groups = True
        """Whether nobody, here or elsewhere, computes a part of the heads of a group."""

    def count(self, unit: Unit) -> int:
        """Units that are computed here."""
        return len(self.own[unit])

    def rows(self, *parts: Part) -> list[range]:
        """Of the outputs of some parts, one behind the other, those that are computed here."""
        ranges, at = [], 0
        for unit, width in parts:
            own = self.own[unit]
            ranges.append(range(at + own.start * width, at + own.stop * width))
            at += len(self.all[unit]) * width
        return ranges

    def pick(self, whole: Tensor, *parts: Part) -> Tensor:
        """Those columns of [..., all outputs of some parts]; `whole` itself, if they are all."""
        ranges = self.rows(*parts)
        if sum(map(len, ranges)) == whole.shape[-1]:
            return whole
        return torch.cat([whole[..., own.start : own.stop] for own in ranges], dim=-1)

    def gather(self, own: Tensor, part: Part) -> Tensor:
        """[n, outputs of a part that are computed here] -> [n, all of them]."""
        return own
