"""Mamba2: a selective state space (Dao and Gu, 2024), as in Granite 4, Bamba, Nemotron-H and Falcon H1."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from nanoengine.core.attention import KVLayer
from nanoengine.core.kernels import WeightSlot
from nanoengine.kernels.recurrences import Decay, StateRuns
from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.mixer import Mixer, facts_of
from nanoengine.models.layers.state_partition import ProjectionPart
from nanoengine.models.model_config import ModelConfig


class Mamba2(Mixer):
    """A convolution of x, B and C, the recurrence, and a gated norm of each group of heads, or a gate alone."""

    prefix = "mamba"

    def __init__(self, config: ModelConfig, layer: int, factory: Factory):
        facts = facts_of(config)
        inner, shared = ProjectionPart("heads", facts.width), ProjectionPart("groups", facts.depth)
        projections = ((inner,), (inner, shared, shared), (ProjectionPart("heads"),))  # gate; x, B, C; dt
        super().__init__(config, layer, factory, projections, 1, inner)
        heads, size = facts.num_heads, facts.num_heads * facts.width
        self.group = size // facts.num_groups
        self.decay = Decay(factory.floats(heads), factory.floats(heads))
        self.skip, self.norm = factory.floats(heads), factory.floats(size if facts.has_norm else 0)

    @cached_property
    def rank_parameters(self) -> tuple[Decay, Tensor, Tensor]:
        """Decay, skip and norm of the heads of this rank."""
        partition, number = self.partition, ProjectionPart("heads")
        decay = Decay(*(partition.pick(part, number) for part in self.decay))
        norm = partition.pick(self.norm, self.mixed) if self.facts.has_norm else self.norm
        return decay, partition.pick(self.skip, number), norm

    def mix(self, projected: Tensor, states: KVLayer, runs: StateRuns) -> Tensor:
        gate, xbc, dt = projected.split(self.widths, dim=-1)
        decay, skip, norm = self.rank_parameters
        xbc = self.kernels.short_conv(xbc, *self.convolution, states[0], runs, silu=True)
        out = self.kernels.mamba2(xbc, dt, decay, skip, self.partition.count("groups"), states[1], runs)
        how = {"gate_first": self.facts.gate_first}
        if not self.facts.has_norm:
            out = self.kernels.sigmoid_gate(out * gate.float(), gate.float()).to(gate.dtype)  # silu(gate)
            return self.partition.gather(out, self.mixed)
        if self.partition.has_whole_groups:
            out = self.kernels.gated_norm(out, gate, norm, self.eps, self.group, **how)
            return self.partition.gather(out, self.mixed)
        # The norm needs the heads of all ranks of a group.
        out, gate = (self.partition.gather(part, self.mixed) for part in (out, gate))
        return self.kernels.gated_norm(out, gate, self.norm, self.eps, self.group, **how)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots = self.in_proj.slots(prefix, "in_proj") | self.out_proj.slots(prefix, "out_proj")
        slots |= self.conv_slots(f"{prefix}.conv1d")
        decay = {f"{prefix}.A_log": self.decay.log_rate, f"{prefix}.dt_bias": self.decay.bias}
        norm = {f"{prefix}.norm.weight": self.norm} if self.facts.has_norm else {}
        return slots | decay | {f"{prefix}.D": self.skip} | norm
