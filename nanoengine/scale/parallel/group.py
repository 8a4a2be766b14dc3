"""Group: what a rank knows of its group, and the weights and the parts of layers with states that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.share import Part, Share
from nanoengine.models.model_config import ModelConfig, StateConfig
from nanoengine.scale.parallel.communicator import Communicator
from nanoengine.scale.parallel.shares import Shares
from nanoengine.scale.parallel.states import units_of_ranks
from nanoengine.scale.parallel.weights import PartialExperts, PartialWeight


class Group:
    """The ranks that share a model.

    Raises:
        InvalidConfig: more ranks than the model has query heads.
    """

    def __init__(self, config: ModelConfig, communicator: Communicator, *, shares_context: bool = False):
        self.config, self.communicator, self.rank = config, communicator, communicator.rank
        self.shares_context = shares_context  # then each rank has all heads
        self.kept_rows: dict[int, Sequence[range]] = {}  # id of a matrix of this rank -> its outputs, among all outputs
        self.shares = Shares(communicator.size, config.num_heads, config.num_kv_heads, config.head_dim)

    def gather(self, part: Tensor, columns: Sequence[range]) -> Tensor:
        """[n, this rank's columns] -> [n, all columns]; several ranks may have the same columns."""
        if len(columns[self.rank]) == columns[-1].stop:
            return part
        widths = [len(own) for own in columns]
        found = self.communicator.gather(part, widths)
        if sum(widths) == columns[-1].stop:
            return found
        parts = zip(columns, found.split(widths, dim=1), strict=True)
        return torch.cat(list({own.start: part for own, part in parts}.values()), dim=1)


class ShareOfRank(Share):
    """The part of one rank, which gathers what the others have computed."""

    def __init__(self, facts: StateConfig, group: Group):
        super().__init__(facts)
        size = group.communicator.size
        self._group, self._of_ranks = group, units_of_ranks(facts, size)
        self.has_whole_groups = size <= facts.num_groups
        self.own = {**self.all, **{unit: ranges[group.rank] for unit, ranges in self._of_ranks.items()}}

    def gather(self, own: Tensor, part: Part) -> Tensor:
        ranges = self._of_ranks[part.unit]
        return self._group.gather(own, [range(o.start * part.width, o.stop * part.width) for o in ranges])


@dataclass(frozen=True, kw_only=True)
class GroupFactory(Factory):
    """Makes a rank's part of each weight. The outputs of one projection are gathered. Two projections are the gates and the gated
    values, whose products are gathered. Three projections are the heads of q, k and v, which are not gathered, unless each rank
    has all heads.
    """

    group: Group
    rows: tuple[range, ...] | None = None
    """Outputs of this rank, among those of all projections together; they are not gathered. None: see above."""

    def weight(self, inputs: int, *outputs: int) -> PartialWeight:
        shares, rank, config = self.group.shares, self.group.rank, self.group.config
        if self.rows is not None:
            return self._weight(inputs, sum(outputs), self.rows, None)
        if len(outputs) != 3:
            columns = [shares.outputs(count) for count in outputs]
            return self._weight(inputs, sum(outputs), ranges_of(rank, outputs, columns), columns[0])
        if self.group.shares_context:
            return self.weight(inputs, sum(outputs))
        heads = [shares.heads, shares.kv_heads, shares.kv_heads]
        if config.has_output_gate:  # before q, with as many outputs
            outputs, heads = (outputs[0] // 2, outputs[0] // 2, *outputs[1:]), [shares.heads, *heads]
        ranges = ranges_of(rank, outputs, [shares.columns(own) for own in heads])
        return self._weight(inputs, sum(outputs), ranges, None)

    def _weight(self, inputs: int, outputs: int, ranges: Sequence[range], columns: list[range] | None) -> PartialWeight:
        own = super().weight(inputs, *map(len, ranges))
        self.group.kept_rows[id(own)] = ranges
        return PartialWeight(own, (outputs, inputs), ranges, columns)

    def experts(self, experts: int, outputs: int, inputs: int) -> PartialExperts:
        columns = self.group.shares.outputs(outputs)
        weights = super().experts(experts, len(columns[self.group.rank]), inputs)
        return PartialExperts(weights, (experts, outputs, inputs), columns, self.group.rank)

    def share(self, facts: StateConfig) -> ShareOfRank:
        return ShareOfRank(facts, self.group)

    def only(self, rows: Sequence[range]) -> GroupFactory:
        return replace(self, rows=tuple(rows))


def ranges_of(rank: int, outputs: Sequence[int], columns: Sequence[list[range]]) -> list[range]:
    """A rank's outputs of projections that stand side by side.

    Args:
        outputs: of each projection.
        columns: of each projection, the outputs of every rank.
    """
    starts = accumulate(outputs, initial=0)
    return [range(at + own[rank].start, at + own[rank].stop) for at, own in zip(starts, columns, strict=False)]
