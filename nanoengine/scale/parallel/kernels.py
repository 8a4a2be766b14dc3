"""Kernels of a rank, which computes some outputs of every product and gathers the outputs of the other ranks.

Nothing is summed across ranks: a sum is computed by one rank, over all inputs, in the order of one device. So all bits are as
on one device, whatever the dtype, the quantization and the number of ranks. In each layer there are four gathers: of the heads
behind attention, of the outputs of o_proj, of the gated values, and of the outputs of down_proj.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from nanoengine.core.kernels import Weight
from nanoengine.errors import InvalidConfig
from nanoengine.kernels.native.operations import NativeKernels
from nanoengine.kernels.operations import Around, ExpertWeights, Kernels, Mixture, QuantizableWeight
from nanoengine.scale.parallel.group import RankGroup
from nanoengine.scale.parallel.weights import PartialExperts, PartialWeight


class GroupKernels(Kernels):
    """The kernels that layers call, around the `local` kernels of one device. Results have all outputs, except q, k and v, and
    the gates before `gate`. Attention and its gates are then over this rank's heads; the product behind them gathers all heads.
    """

    def __init__(self, local: Kernels, group: RankGroup):
        self.local, self.group = local, group
        self.name, self.description, self.quantized_products = local.name, local.description, local.quantized_products
        # Layers with states are partitioned otherwise: see `RankStatePartition`.
        self.short_conv, self.delta_rule, self.mamba2 = local.short_conv, local.delta_rule, local.mamba2
        self.gated_norm, self.sigmoid_gate = local.gated_norm, local.sigmoid_gate

    def new_weight(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> QuantizableWeight:
        return self.local.new_weight(outputs, inputs, dtype, device)

    def new_experts(
        self, experts: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> ExpertWeights:
        if not isinstance(self.local, NativeKernels):
            raise InvalidConfig(
                f"tensor_parallel_size is {self.group.communicator.size}, but the {self.local.name} kernels compute mixtures of "
                "experts in one piece: use the native kernels, or one rank"
            )
        return self.local.new_experts(experts, outputs, inputs, dtype, device)

    # ---- products

    def product(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, **around: Unpack[Around]
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(weight, PartialWeight)
        if x.shape[1] != weight.shape[1]:  # attention's outputs for this rank's heads
            partition = self.group.partition
            x = self.group.gather(x, partition.columns(partition.heads))
        out, total = self.local.product(x, weight.shard, weight.bias(bias), **around)
        if weight.columns is None or (around.get("activation") is None and len(weight.ranges) > 1):
            return out, total
        return self.group.gather(out, weight.columns), total

    def gate(self, both: Tensor, activation: str) -> Tensor:
        """Gate the values of an MLP, in a layer without experts, and gather them."""
        columns = self.group.partition.outputs(self.group.config.intermediate_size)
        return self.group.gather(self.local.gate(both, activation), columns)

    def experts(self, x: Tensor, mixture: Mixture, chosen: Tensor, factors: Tensor) -> Tensor:
        gate, up, down = (each for each in mixture.weights if isinstance(each, PartialExperts))
        assert isinstance(self.local, NativeKernels)
        biases = mixture.biases
        of_gates = None if biases is None else (gate.bias(biases.gate), up.bias(biases.up))
        gated = self.local.gate_experts(x, (gate.shard, up.shard), chosen, mixture.activation, of_gates)
        gated = self.group.gather(gated, gate.columns)
        of_down = None if biases is None else down.bias(biases.down)
        return self.group.gather(self.local.add_up_experts(gated, down.shard, chosen, factors, of_down), down.columns)

    # ---- everything else

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        """Rows of the embedding: each rank looks up its part of the vocabulary; its rows of other tokens are dropped."""
        assert isinstance(weight, PartialWeight)
        assert weight.columns is not None
        vocabulary, (ids_of_rank,) = weight.columns, weight.ranges
        rows = self.local.embed((token_ids - ids_of_rank.start).clamp(0, len(ids_of_rank) - 1), weight.shard)
        if len(ids_of_rank) == weight.shape[0]:
            return rows
        width, size = rows.shape[1], len(vocabulary)
        of_ranks = self.group.communicator.gather(rows, [width] * size).view(-1, size, width)
        ends = torch.tensor([each.stop for each in vocabulary], dtype=torch.int64, device=token_ids.device)
        ranks = (token_ids[:, None] >= ends).sum(1)
        return of_ranks.gather(1, ranks[:, None, None].expand(-1, 1, width))[:, 0]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm. Where x has some heads, and the weight is for all heads, the heads of the other ranks are gathered first."""
        if x.shape[-1] == weight.shape[0]:
            return self.local.rms_norm(x, weight, eps)
        partition = self.group.partition
        are_queries = weight.shape[0] == partition.num_heads * partition.head_dim
        columns = partition.columns(partition.heads if are_queries else partition.kv_heads)
        of_rank = columns[self.group.rank]
        return self.local.rms_norm(self.group.gather(x, columns), weight, eps)[:, of_rank.start : of_rank.stop]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self.local.add_rms_norm(x, residual, weight, eps)
