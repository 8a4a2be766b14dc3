"""Mamba2: a selective state space (Dao and Gu, 2024), as in Granite 4."""

from __future__ import annotations

from torch import Tensor

from nanoengine.core.attention import KVLayer
from nanoengine.core.kernels import WeightSlot
from nanoengine.core.layers import Linear
from nanoengine.kernels.recurrences import Decay, StateRuns
from nanoengine.layers.factory import Factory
from nanoengine.layers.mixer import Mixer
from nanoengine.models.model_config import StateConfig


class Mamba2(Mixer):
    """x, B and C go through a convolution and the recurrence; a gated norm of groups of heads is behind it.

    Args:
        eps: of that norm.
    """

    prefix = "mamba"

    def __init__(self, layer: int, hidden_size: int, facts: StateConfig, factory: Factory, eps: float):
        super().__init__(layer, facts, factory)
        self.eps, heads, self.inner = eps, facts.num_heads, facts.num_heads * facts.width
        self.widths = self.inner, facts.channels, heads
        self.in_proj = Linear(factory, hidden_size, *self.widths, bias=facts.proj_bias)
        self.out_proj = Linear(factory, self.inner, hidden_size, bias=facts.proj_bias)
        self.decay = Decay(factory.floats(heads), factory.floats(heads))
        self.skip, self.norm = factory.floats(heads), factory.floats(self.inner)

    def mix(self, projected: Tensor, states: KVLayer, runs: StateRuns) -> Tensor:
        gate, xbc, dt = projected.split(self.widths, dim=-1)
        xbc = self.kernels.short_conv(xbc, self.weight, self.bias, states[0], runs, silu=True)
        out = self.kernels.mamba2(xbc, dt, self.decay, self.skip, self.facts.num_groups, states[1], runs)
        group = self.inner // self.facts.num_groups
        return self.kernels.gated_norm(out, gate, self.norm, self.eps, group, gate_first=True)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots = self.in_proj.slots(prefix, "in_proj") | self.out_proj.slots(prefix, "out_proj")
        slots |= self.conv_slots(f"{prefix}.conv1d")
        decay = {f"{prefix}.A_log": self.decay.log_rate, f"{prefix}.dt_bias": self.decay.bias}
        return slots | decay | {f"{prefix}.D": self.skip, f"{prefix}.norm.weight": self.norm}
