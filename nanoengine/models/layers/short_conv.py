"""ShortConv: a gated short convolution (LFM2, Liquid AI, 2025). Its state is the inputs of the last taps - 1 tokens."""

from __future__ import annotations

from torch import Tensor

from nanoengine.core.attention import KVLayer
from nanoengine.core.kernels import WeightSlot
from nanoengine.kernels.recurrences import StateRuns
from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.mixer import Mixer
from nanoengine.models.layers.state_partition import ProjectionPart
from nanoengine.models.model_config import ModelConfig


class ShortConv(Mixer):
    """Output: C * conv(B * x), of the projections B, C and x of a token."""

    prefix = "conv"

    def __init__(self, config: ModelConfig, layer: int, factory: Factory):
        each = ProjectionPart("channels")
        super().__init__(config, layer, factory, ((each,), (each,), (each,)), 2, each)

    def mix(self, projected: Tensor, states: KVLayer, runs: StateRuns) -> Tensor:
        before, after, x = projected.chunk(3, dim=-1)
        out = self.kernels.short_conv(x, *self.convolution, states[0], runs, before=before, after=after)
        return self.partition.gather(out, self.mixed)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        projections = self.in_proj.slots(prefix, "in_proj") | self.out_proj.slots(prefix, "out_proj")
        return projections | self.conv_slots(f"{prefix}.conv")
