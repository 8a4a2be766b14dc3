"""Mixer: what layers with states have in common. It stands where attention would, behind the same norm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nanoengine.core.attention import AttentionMetadata, KVLayer
from nanoengine.core.kernels import WeightSlot
from nanoengine.core.layers import Angles, Linear, RMSNorm
from nanoengine.kernels.recurrences import StateRuns, Stores
from nanoengine.layers.factory import Factory
from nanoengine.layers.norm import OffsetNorm
from nanoengine.models.model_config import StateConfig


@dataclass(kw_only=True)
class StateMetadata(AttentionMetadata):
    """A step in which states are not simply kept behind the last token of each run."""

    stores: Stores
    kept: dict[int, Tensor]  # of each layer, what it projected: drafts are applied to the states when it is known which
    keeps: bool  # whether that is wanted


class Mixer(ABC):
    """Two projections, and between them tokens are mixed with those before by way of a state.

    States are (inputs of the convolution, state of the recurrence), each [num_slots, ...] float32.
    """

    prefix: ClassVar[str]
    """What a checkpoint calls it."""

    in_proj: Linear
    out_proj: Linear

    def __init__(self, layer: int, facts: StateConfig, factory: Factory):
        self.layer, self.facts, self.kernels = layer, facts, factory.kernels
        self.weight = factory.floats(facts.taps, facts.channels)
        self.bias = factory.floats(facts.channels) if facts.conv_bias else None

    def __call__(
        self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None, angles: Angles | None, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(norm, OffsetNorm)
        assert metadata.rows is not None
        projected, residual = norm.then_linear(hidden, residual, self.in_proj)
        stores = None
        if isinstance(metadata, StateMetadata):
            stores = metadata.stores
            if metadata.keeps:
                metadata.kept[self.layer] = projected
        runs = StateRuns(metadata.rows, metadata.query_start_loc, stores)
        return self.out_proj(self.mix(projected, metadata.kv_cache[self.layer], runs)), residual

    @abstractmethod
    def mix(self, projected: Tensor, states: KVLayer, runs: StateRuns) -> Tensor:
        """What goes into `out_proj`, of what came out of `in_proj`; the states go on."""

    @abstractmethod
    def slots(self, prefix: str) -> dict[str, WeightSlot]: ...

    def conv_slots(self, prefix: str) -> dict[str, WeightSlot]:
        bias = {} if self.bias is None else {f"{prefix}.bias": self.bias}
        return {f"{prefix}.weight": Taps(self.weight), **bias}


class Taps:
    """A place in [taps, channels] for [channels, 1, taps]."""

    def __init__(self, weight: Tensor):
        self.weight = weight
        taps, channels = weight.shape
        self.shape = weight.new_empty(channels, 1, taps, device="meta").shape

    def copy_(self, source: Tensor) -> None:
        self.weight.copy_(source[:, 0].T)
