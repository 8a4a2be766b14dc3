"""RankGroup: the ranks of one model, and the weights and states of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.state_partition import ProjectionPart, StatePartition
from nanoengine.models.model_config import ModelConfig, StateConfig
from nanoengine.scale.parallel.communicator import Communicator
from nanoengine.scale.parallel.partition import Partition
from nanoengine.scale.parallel.states import units_of_ranks
from nanoengine.scale.parallel.weights import PartialExperts, PartialWeight


class RankGroup:
    """The ranks of one model.

    Raises:
        InvalidConfig: more ranks than the model has query heads.
    """

    def __init__(self, config: ModelConfig, communicator: Communicator, *, splits_context: bool = False):
        self.config, self.communicator, self.rank = config, communicator, communicator.rank
        self.splits_context = splits_context  # each rank has all heads, and some tokens
        self.rows_of_rank: dict[int, Sequence[range]] = {}  # id of a matrix here -> its outputs, among all
        self.partition = Partition(communicator.size, config.num_heads, config.num_kv_heads, config.head_dim)

    def gather(self, part: Tensor, columns: Sequence[range]) -> Tensor:
        """[n, this rank's columns] -> [n, all columns]; several ranks may have the same columns."""
        if len(columns[self.rank]) == columns[-1].stop:
            return part
        widths = [len(each) for each in columns]
        gathered = self.communicator.gather(part, widths)
        if sum(widths) == columns[-1].stop:
            return gathered
        parts = zip(columns, gathered.split(widths, dim=1), strict=True)
        return torch.cat(list({each.start: part for each, part in parts}.values()), dim=1)


class RankStatePartition(StatePartition):
    """Heads, groups or channels of one rank in a layer with states; `gather` returns the outputs of all ranks."""

    def __init__(self, facts: StateConfig, group: RankGroup):
        super().__init__(facts)
        size = group.communicator.size
        self._group, self._of_ranks = group, units_of_ranks(facts, size)
        self.has_whole_groups = size <= facts.num_groups
        self.local = {**self.all, **{unit: ranges[group.rank] for unit, ranges in self._of_ranks.items()}}

    def gather(self, outputs: Tensor, part: ProjectionPart) -> Tensor:
        ranges = self._of_ranks[part.unit]
        return self._group.gather(outputs, [range(o.start * part.width, o.stop * part.width) for o in ranges])


@dataclass(frozen=True, kw_only=True)
class GroupFactory(Factory):
    """Factory of a rank's part of each weight. The outputs of one projection are gathered. Two projections are the gates and the
    gated values, whose products are gathered. Three projections are the heads of q, k and v, which are not gathered, unless each
    rank has all heads.
    """

    group: RankGroup
    rows: tuple[range, ...] | None = None
    """Outputs of this rank, counted over all projections; they are not gathered. None: see above."""

    def weight(self, inputs: int, *outputs: int) -> PartialWeight:
        partition, rank, config = self.group.partition, self.group.rank, self.group.config
        if self.rows is not None:
            return self._weight(inputs, sum(outputs), self.rows, None)
        if len(outputs) != 3:
            columns = [partition.outputs(count) for count in outputs]
            return self._weight(inputs, sum(outputs), ranges_of(rank, outputs, columns), columns[0])
        if self.group.splits_context:
            return self.weight(inputs, sum(outputs))
        heads = [partition.heads, partition.kv_heads, partition.kv_heads]
        if config.has_output_gate:  # before q, with as many outputs
            outputs, heads = (outputs[0] // 2, outputs[0] // 2, *outputs[1:]), [partition.heads, *heads]
        ranges = ranges_of(rank, outputs, [partition.columns(each) for each in heads])
        return self._weight(inputs, sum(outputs), ranges, None)

    def _weight(self, inputs: int, outputs: int, ranges: Sequence[range], columns: list[range] | None) -> PartialWeight:
        shard = super().weight(inputs, *map(len, ranges))
        self.group.rows_of_rank[id(shard)] = ranges
        return PartialWeight(shard, (outputs, inputs), ranges, columns)

    def experts(self, experts: int, outputs: int, inputs: int) -> PartialExperts:
        columns = self.group.partition.outputs(outputs)
        weights = super().experts(experts, len(columns[self.group.rank]), inputs)
        return PartialExperts(weights, (experts, outputs, inputs), columns, self.group.rank)

    def partition(self, facts: StateConfig) -> RankStatePartition:
        return RankStatePartition(facts, self.group)

    def only(self, rows: Sequence[range]) -> GroupFactory:
        return replace(self, rows=tuple(rows))


def ranges_of(rank: int, outputs: Sequence[int], columns: Sequence[list[range]]) -> list[range]:
    """Outputs of a rank in projections that stand side by side.

    Args:
        outputs: of each projection.
        columns: of each projection, the outputs of every rank.
    """
    starts = accumulate(outputs, initial=0)
    return [range(at + each[rank].start, at + each[rank].stop) for at, each in zip(starts, columns, strict=False)]
