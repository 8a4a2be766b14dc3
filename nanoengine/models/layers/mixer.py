"""Mixer: what layers with states have in common. It stands where attention would, behind the same norm."""

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
from nanoengine.models.layers.share import Part
from nanoengine.models.layers.slots import taps_first
from nanoengine.models.model_config import StateConfig


@dataclass(kw_only=True)
class StateMetadata(AttentionMetadata):
    """A step in which states are not simply kept behind the last token of each run."""

    stores: Stores
    kept: dict[
        int, Tensor
    ]  # place of a mixer -> projections of draft tokens, until it is known which drafts were accepted
    keeps: bool  # whether projections are kept


class Mixer(ABC):
    """Two projections, and between them tokens are mixed with those before by way of a state.

    States are (inputs of the convolution, state of the recurrence), each [num_slots, ...] float32.

    Args:
        place: of its states in the KV cache.
        projections: what `in_proj` makes of a token, each of parts that stand side by side.
        convolved: which of them goes through the convolution.
        mixed: what `out_proj` reads.
    """

    prefix: ClassVar[str]
    """What a checkpoint calls it."""

    def __init__(
        self,
        place: int,
        hidden_size: int,
        facts: StateConfig,
        factory: Factory,
        projections: Sequence[Sequence[Part]],
        convolved: int,
        mixed: Part,
    ):
        self.place, self.facts, self.kernels = place, facts, factory.kernels
        self.share = share = factory.share(facts)
        self.convolved, self.mixed = projections[convolved], mixed
        self.widths = [_width(share.rows(*parts)) for parts in projections]  # of what is computed here
        everything = [sum(len(share.all[part.unit]) * part.width for part in parts) for parts in projections]
        rows = share.rows(*(part for parts in projections for part in parts))
        self.in_proj = Linear(factory.only(rows), hidden_size, *everything, bias=facts.proj_bias)
        self.out_proj = Linear(factory, len(share.all[mixed.unit]) * mixed.width, hidden_size, bias=facts.proj_bias)
        self.weight = factory.floats(facts.taps, facts.channels)
        self.bias = factory.floats(facts.channels) if facts.conv_bias else None

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the states that are kept here, as `StateConfig.shapes`."""
        facts, heads = self.facts, self.share.count("heads")
        return (facts.taps - 1, _width(self.share.rows(*self.convolved))), (heads, facts.depth, facts.width)

    @cached_property
    def convolution(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the channels that are computed here; they are set by now."""
        bias = None if self.bias is None else self.share.pick(self.bias, *self.convolved)
        return self.share.pick(self.weight, *self.convolved), bias

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
                metadata.kept[self.place] = projected
        runs = StateRuns(metadata.rows, metadata.query_start_loc, stores)
        return self.out_proj(self.mix(projected, metadata.kv_cache[self.place], runs)), residual

    @abstractmethod
    def mix(self, projected: Tensor, states: KVLayer, runs: StateRuns) -> Tensor:
        """What goes into `out_proj`, of what came out of `in_proj`; the states go on."""

    @abstractmethod
    def slots(self, prefix: str) -> dict[str, WeightSlot]: ...

    def conv_slots(self, prefix: str) -> dict[str, WeightSlot]:
        bias = {} if self.bias is None else {f"{prefix}.bias": self.bias}
        return {f"{prefix}.weight": taps_first(self.weight), **bias}


def _width(rows: Sequence[range]) -> int:
    return sum(map(len, rows))
