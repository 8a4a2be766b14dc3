"""Mixer: base class of layers with recurrent states, which replace attention behind the same norm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from nanoengine.core.attention import AttentionMetadata, KVLayer
from nanoengine.core.kernels import WeightSlot
from nanoengine.core.layers import Angles, Linear, RMSNorm
from nanoengine.kernels.recurrences import StateRuns, Stores
from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.norm import OffsetNorm
from nanoengine.models.layers.slots import taps_first
from nanoengine.models.layers.state_partition import ProjectionPart
from nanoengine.models.model_config import ModelConfig, StateConfig


@dataclass(kw_only=True)
class StateMetadata(AttentionMetadata):
    """Metadata of a step that stores states at other tokens than the last of each run."""

    stores: Stores
    # Index of a mixer in the KV cache -> projections of draft tokens, until these are verified.
    projections: dict[int, Tensor]
    keeps_projections: bool  # whether to store projections in `projections`


class Mixer(ABC):
    """Two projections, and between them a convolution and a recurrence over the tokens of a sequence.

    States are (inputs of the convolution, state of the recurrence), each [num_slots, ...] float32.

    Args:
        layer: its number. The states of all layers follow their K/V in the KV cache.
        projections: the outputs of `in_proj`, each as its parts in order.
        convolved: index of the projection that the convolution reads.
        mixed: the input of `out_proj`.
    """

    prefix: ClassVar[str]
    """Its name in a checkpoint."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        factory: Factory,
        projections: Sequence[Sequence[ProjectionPart]],
        convolved: int,
        mixed: ProjectionPart,
    ):
        facts, hidden_size = facts_of(config), config.hidden_size
        self.state_index, self.facts, self.kernels = config.num_layers + layer, facts, factory.kernels
        self.eps = config.rms_norm_eps
        self.partition = partition = factory.partition(facts)
        self.convolved, self.mixed = projections[convolved], mixed
        self.widths = [_width(partition.rows(*parts)) for parts in projections]  # of this rank
        sizes = [sum(len(partition.all[part.unit]) * part.width for part in parts) for parts in projections]
        rows = partition.rows(*(part for parts in projections for part in parts))
        self.in_proj = Linear(factory.only(rows), hidden_size, *sizes, bias=facts.proj_bias)
        self.out_proj = Linear(factory, len(partition.all[mixed.unit]) * mixed.width, hidden_size, bias=facts.proj_bias)
        self.weight = factory.floats(facts.taps, facts.channels)
        self.bias = factory.floats(facts.channels) if facts.conv_bias else None

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the states of this rank, as `StateConfig.shapes`."""
        facts, heads = self.facts, self.partition.count("heads")
        return (facts.taps - 1, _width(self.partition.rows(*self.convolved))), (heads, facts.depth, facts.width)

    @cached_property
    def convolution(self) -> tuple[Tensor, Tensor | None]:
        """Weight [taps, channels] and bias [channels] of the channels of this rank; valid after loading."""
        bias = None if self.bias is None else self.partition.pick(self.bias, *self.convolved)
        return self.partition.pick(self.weight, *self.convolved), bias

    def __call__(
        self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None, angles: Angles | None, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(norm, OffsetNorm)
        assert metadata.rows is not None
        projected, residual = norm.then_linear(hidden, residual, self.in_proj)
        stores = None
        if isinstance(metadata, StateMetadata):
            stores = metadata.stores
            if metadata.keeps_projections:
                metadata.projections[self.state_index] = projected
        runs = StateRuns(metadata.rows, metadata.query_start_loc, stores)
        return self.out_proj(self.mix(projected, metadata.kv_cache[self.state_index], runs)), residual

    @abstractmethod
    def mix(self, projected: Tensor, states: KVLayer, runs: StateRuns) -> Tensor:
        """[num_tokens, outputs of `in_proj`] -> [num_tokens, inputs of `out_proj`]; the states are overwritten."""

    @abstractmethod
    def slots(self, prefix: str) -> dict[str, WeightSlot]: ...

    def conv_slots(self, prefix: str) -> dict[str, WeightSlot]:
        bias = {} if self.bias is None else {f"{prefix}.bias": self.bias}
        return {f"{prefix}.weight": taps_first(self.weight), **bias}


def facts_of(config: ModelConfig) -> StateConfig:
    """The sizes of the states of a model that has some."""
    assert config.states is not None
    return config.states


def _width(rows: Sequence[range]) -> int:
    return sum(map(len, rows))
