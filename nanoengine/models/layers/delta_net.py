"""DeltaNet: linear attention by the gated delta rule (Yang et al., 2024), as in Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from nanoengine.core.attention import KVLayer
from nanoengine.core.kernels import WeightSlot
from nanoengine.kernels.recurrences import Decay, StateRuns
from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.mixer import Mixer, facts_of
from nanoengine.models.layers.slots import Reordered
from nanoengine.models.layers.state_partition import ProjectionPart
from nanoengine.models.model_config import ModelConfig


class DeltaNet(Mixer):
    """A convolution of q, k and v, the recurrence, and a norm of each head, gated by z."""

    prefix = "linear_attn"

    def __init__(self, config: ModelConfig, layer: int, factory: Factory):
        facts, number = facts_of(config), ProjectionPart("heads")
        key, value = ProjectionPart("groups", facts.depth), ProjectionPart("heads", facts.width)
        projections = ((key, key, value), (value,), (number,), (number,))  # q, k, v; z; b; a
        super().__init__(config, layer, factory, projections, 0, value)
        heads = facts.num_heads
        self.decay = Decay(factory.floats(heads), factory.floats(heads))
        self.norm = factory.floats(facts.width)

    @cached_property
    def rank_decay(self) -> Decay:
        """The decay of the heads of this rank."""
        return Decay(*(self.partition.pick(part, ProjectionPart("heads")) for part in self.decay))

    def mix(self, projected: Tensor, states: KVLayer, runs: StateRuns) -> Tensor:
        qkv, z, b, a = projected.split(self.widths, dim=-1)
        qkv = self.kernels.short_conv(qkv, *self.convolution, states[0], runs, silu=True)
        groups = self.partition.count("groups")
        out = self.kernels.delta_rule(qkv, a, b, self.rank_decay, groups, states[1], runs, tiled=self.facts.is_tiled)
        out = self.kernels.gated_norm(out, z, self.norm, self.eps, self.facts.width, gate_first=False)
        return self.partition.gather(out, self.mixed)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots = (
            self._projections(prefix) | self.out_proj.slots(prefix, "out_proj") | self.conv_slots(f"{prefix}.conv1d")
        )
        decay = {f"{prefix}.A_log": self.decay.log_rate, f"{prefix}.dt_bias": self.decay.bias}
        return slots | decay | {f"{prefix}.norm.weight": self.norm}

    def _projections(self, prefix: str) -> dict[str, WeightSlot]:
        """Slots of `in_proj`. Qwen3-Next packs q, k, v and z of each key head, and likewise b and a."""
        facts, first = self.facts, sum(self.in_proj.out_features[:2])
        groups, heads = facts.num_groups, facts.num_heads // facts.num_groups  # value heads of a key head
        slots = self.in_proj.slots(prefix, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        rows, width = self.in_proj.weight.rows, heads * facts.width
        for name, parts, slot, sizes in (
            ("qkvz", ("qkv", "z"), rows(0, first), (facts.depth, facts.depth, width, width)),
            ("ba", ("b", "a"), rows(first, 2 * facts.num_heads), (heads, heads)),
        ):
            if name in facts.packed:
                for part in parts:
                    del slots[f"{prefix}.in_proj_{part}.weight"]
                slots[f"{prefix}.in_proj_{name}.weight"] = Reordered(slot, _unpacked(groups, *sizes), 1)
        return slots


def _unpacked(groups: int, *sizes: int) -> list[int]:
    """Row indices that reorder [groups, parts] to [parts, groups]; `sizes`: rows of each part of a group."""
    rows = torch.arange(groups * sum(sizes), dtype=torch.int64, device="cpu").view(groups, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)]).tolist()
