"""Kernels of a rank: it computes some outputs of every product, and gathers the outputs of the other ranks.

Nothing is summed across ranks: a sum is computed by one rank, over all inputs, in the order of one device. So all bits are those
of one device, whatever the dtype, the quantization and the number of ranks. In each layer there are four gathers: of the heads
behind attention, of the outputs of o_proj, of the gated values, and of the outputs of down_proj.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.core.kernels import Weight
from nanoengine.errors import InvalidConfig
from nanoengine.kernels.native.operations import NativeKernels
from nanoengine.kernels.operations import ExpertWeights, Kernels, Mixture, Norm, QuantizableWeight
from nanoengine.scale.parallel.group import Group
from nanoengine.scale.parallel.weights import PartialExperts, PartialWeight


class GroupKernels(Kernels):
    """The kernels that layers call, around `own` kernels. Results have all outputs, but for those of q, k and v, and the gates
    before `gate`. Attention and its gates are then over this rank's heads; the product behind them gathers all heads.
    """

    def __init__(self, own: Kernels, group: Group):
        self.own, self.group = own, group
        self.name, self.description, self.quantized_products = own.name, own.description, own.quantized_products
        # Layers with states have a share of their own: see `ShareOfRank`.
        self.short_conv, self.delta_rule, self.mamba2 = own.short_conv, own.delta_rule, own.mamba2
        self.gated_norm, self.sigmoid_gate = own.gated_norm, own.sigmoid_gate

    def new_weight(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> QuantizableWeight:
        return self.own.new_weight(outputs, inputs, dtype, device)

    def new_experts(
        self, experts: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> ExpertWeights:
        if not isinstance(self.own, NativeKernels):
            raise InvalidConfig(
                f"tensor_parallel_size is {self.group.communicator.size}, but the {self.own.name} kernels compute mixtures of "
                "experts in one piece: use the native kernels, or one rank"
            )
        return self.own.new_experts(experts, outputs, inputs, dtype, device)

    # ---- products

    def product(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        activation: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(weight, PartialWeight)
        if x.shape[1] != weight.shape[1]:  # attention's outputs for this rank's heads
            shares = self.group.shares
            x = self.group.gather(x, shares.columns(shares.heads))
        out, total = self.own.product(
            x, weight.own, weight.bias(bias), norm=norm, residual=residual, activation=activation, dtype=dtype
        )
        if weight.columns is None or (activation is None and len(weight.ranges) > 1):
            return out, total
        return self.group.gather(out, weight.columns), total

    def gate(self, both: Tensor, activation: str) -> Tensor:
        """Gate the values of an MLP, in a layer without experts, and gather them."""
        columns = self.group.shares.outputs(self.group.config.intermediate_size)
        return self.group.gather(self.own.gate(both, activation), columns)

    def experts(self, x: Tensor, mixture: Mixture, chosen: Tensor, factors: Tensor) -> Tensor:
        gate, up, down = (own for own in mixture.weights if isinstance(own, PartialExperts))
        assert isinstance(self.own, NativeKernels)
        biases = mixture.biases
        of_gates = None if biases is None else (gate.bias(biases.gate), up.bias(biases.up))
        gated = self.own.gate_experts(x, (gate.own, up.own), chosen, mixture.activation, of_gates)
        gated = self.group.gather(gated, gate.columns)
        of_down = None if biases is None else down.bias(biases.down)
        return self.group.gather(self.own.add_up_experts(gated, down.own, chosen, factors, of_down), down.columns)

    # ---- everything else

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        """Each rank looks up the tokens of its part of the vocabulary, and any row for other tokens, which is dropped."""
        assert isinstance(weight, PartialWeight)
        assert weight.columns is not None
        vocabulary, (own,) = weight.columns, weight.ranges
        found = self.own.embed((token_ids - own.start).clamp(0, len(own) - 1), weight.own)
        if len(own) == weight.shape[0]:
            return found
        width, size = found.shape[1], len(vocabulary)
        of_ranks = self.group.communicator.gather(found, [width] * size).view(-1, size, width)
        ends = torch.tensor([each.stop for each in vocabulary], dtype=torch.int64, device=token_ids.device)
        owners = (token_ids[:, None] >= ends).sum(1)
        return of_ranks.gather(1, owners[:, None, None].expand(-1, 1, width))[:, 0]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """If x has some heads, and the weight is for all of them, the heads of the other ranks are gathered first."""
        if x.shape[-1] == weight.shape[0]:
            return self.own.rms_norm(x, weight, eps)
        shares = self.group.shares
        are_queries = weight.shape[0] == shares.num_heads * shares.head_dim
        columns = shares.columns(shares.heads if are_queries else shares.kv_heads)
        own = columns[self.group.rank]
        return self.own.rms_norm(self.group.gather(x, columns), weight, eps)[:, own.start : own.stop]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self.own.add_rms_norm(x, residual, weight, eps)
