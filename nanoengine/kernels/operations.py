"""Kernels: the operations that layers are made of, beyond those of the core."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol, TypedDict, Unpack, runtime_checkable

import torch
from torch import Tensor

from nanoengine.core.kernels import CoreKernels, Weight, WeightSlot
from nanoengine.kernels import recurrences
from nanoengine.kernels.quantized.tensor import QuantizedExperts, QuantizedTensor

Changes = tuple[Tensor | None, Tensor | None, float, Tensor | None, Tensor | None]
"""What happens to the heads of q and k: (q_weight, k_weight, eps, cos, sin). The weights of the norms are [head_dim] float32, cos
and sin [num_tokens, 1, head_dim / 2] float32; None for both of a pair leaves the norm, or the rotation, out."""

Write = Callable[[Tensor], Tensor]
"""q, k and v of all heads, [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], to q [num_tokens, num_heads, head_dim], and k
and v to the cache."""


@runtime_checkable
class QuantizedSlot(WeightSlot, Protocol):
    """Storage that accepts quantized rows; formats that the kernels have no product for are dequantized.

    All rows of a weight need not be of one format: of qkv_proj, v often has more bits than q and k.
    """

    def copy_quantized(self, source: QuantizedTensor, /) -> None: ...


@runtime_checkable
class SlotInParts(WeightSlot, Protocol):
    """Storage for a tensor that is several matrices, each stored separately."""

    def parts(
        self, source: Tensor | QuantizedTensor | QuantizedExperts, /
    ) -> Iterator[tuple[Tensor | QuantizedTensor, WeightSlot]]: ...


class QuantizableWeight(Weight, Protocol):
    """A matrix [outputs, inputs] whose rows may be quantized."""

    def formats(self) -> Mapping[str, int]:
        """Bytes that it takes, by the name of the format that they are in."""
        ...

    def rows(self, first: int, count: int) -> QuantizedSlot:
        """Rows [first, first + count), to be filled from a checkpoint."""
        ...


class Puts(Protocol):
    """A weight that is filled row by row."""

    shape: torch.Size

    def put_numbers(self, first: int, source: Tensor) -> None:
        """Rows from `first` on become these numbers."""

    def put_quantized(self, first: int, source: QuantizedTensor) -> None:
        """The same with quantized ones, which stay that as far as the weight can hold them."""


class WeightRows:
    """Rows [first, first + count) of such a weight."""

    def __init__(self, weight: Puts, first: int, count: int):
        self.weight, self.first = weight, first
        self.shape = torch.Size((count, weight.shape[1]))

    def copy_(self, source: Tensor) -> None:
        assert source.shape == self.shape
        self.weight.put_numbers(self.first, source)

    def copy_quantized(self, source: QuantizedTensor) -> None:
        assert source.shape == self.shape
        self.weight.put_quantized(self.first, source)


class ExpertWeights:
    """A matrix [outputs, inputs] for each expert, in one weight: that of expert e begins at row e * outputs.

    Attributes:
        shape: (experts, outputs, inputs)
    """

    def __init__(self, weight: QuantizableWeight, experts: int):
        outputs, inputs = weight.shape
        self.weight, self.shape = weight, torch.Size((experts, outputs // experts, inputs))

    def formats(self) -> Mapping[str, int]:
        """As of a `QuantizableWeight`."""
        return self.weight.formats()

    def expert(self, index: int) -> QuantizedSlot:
        """The matrix of one expert, to be filled from a checkpoint."""
        outputs = self.shape[1]
        return self.weight.rows(index * outputs, outputs)


class Norm(NamedTuple):
    """An RMSNorm of the input of a product."""

    weight: Tensor  # [inputs] float32
    eps: float


class Around(TypedDict, total=False):
    """What stands before and behind a product, in one call with it."""

    norm: Norm | None  # of the input
    residual: Tensor | None  # like the input, added before the norm, which it needs; it may be overwritten
    activation: (
        str | None
    )  # GATES[activation](x G^T, x U^T) is the result, where the rows of the weight are G and then U
    dtype: torch.dtype | None  # of the result: that of the input, or float32, to which sums are then not rounded down


class ExpertBiases(NamedTuple):
    """What is added to the three products of each expert, float32."""

    gate: Tensor  # [experts, size]
    up: Tensor  # [experts, size]
    down: Tensor  # [experts, hidden]


class Mixture(NamedTuple):
    """A mixture of experts, each a gated MLP."""

    gate: ExpertWeights  # matrices [size, hidden]
    up: ExpertWeights  # as gate
    down: ExpertWeights  # matrices [hidden, size]
    activation: str = "silu"  # one of `gates.py`
    biases: ExpertBiases | None = None

    @property
    def weights(self) -> tuple[ExpertWeights, ExpertWeights, ExpertWeights]:
        return self[:3]


class Kernels(CoreKernels, ABC):
    """One implementation, with mixtures of experts, other activations, and quantized weights."""

    quantized_products: str
    """How quantized weights are multiplied, for the start-up line."""
    can_fuse = True
    """Whether several operations may be fused. Not where something changes what `product` returns."""

    short_conv = staticmethod(recurrences.short_conv)
    delta_rule = staticmethod(recurrences.delta_rule)
    mamba2 = staticmethod(recurrences.mamba2)
    gated_norm = staticmethod(recurrences.gated_norm)
    sigmoid_gate = staticmethod(recurrences.sigmoid_gate)

    @abstractmethod
    def new_weight(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> QuantizableWeight:
        """A matrix with unset rows."""

    @abstractmethod
    def gate(self, both: Tensor, activation: str) -> Tensor:
        """GATES[activation](first half of each row, second half) (`gates.py`): [num_tokens, 2 * width] -> [num_tokens, width]."""
        ...

    @abstractmethod
    def product(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, **around: Unpack[Around]
    ) -> tuple[Tensor, Tensor]:
        """A linear layer, with what stands before and behind it: (activation(norm(x + residual) W^T + bias), x + residual).

        Args:
            x: [num_tokens, inputs].
            bias: [outputs]. There is none beside an activation.
            around: the norm, residual, activation and dtype of `Around`; what is missing is None.

        Returns:
            [num_tokens, outputs], or half as wide behind an activation; and the input of the norm, which is x without a residual.
        """
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return self.product(x, weight, bias)[0]

    def heads(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        write: Write,
        *,
        norm: Norm | None,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """A product of q, k and v, and what `write` makes of it: (q, x + residual). Arguments are those of `product`."""
        qkv, total = self.product(x, weight, bias, norm=norm, residual=residual)
        return write(qkv), total

    def mlp(
        self,
        x: Tensor,
        gate_up: Weight,
        down: Weight,
        activation: str,
        *,
        norm: Norm | None,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """A gated MLP without biases: (activation(norm(x + residual)) D^T, x + residual), both [num_tokens, hidden].

        Args:
            gate_up: [2 * size, hidden], the rows of the gates first.
            down: [hidden, size].
            x, activation, norm, residual: those of `product`.
        """
        gated, total = self.product(x, gate_up, norm=norm, residual=residual, activation=activation)
        return self.linear(gated, down, None), total

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        return self.product(hidden, weight, dtype=torch.float32)[0]

    def normed(self, x: Tensor, norm: Norm | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """What a product reads, by operations that stand alone: (norm(x + residual), x + residual)."""
        if norm is None:
            return x, x
        return (self.rms_norm(x, *norm), x) if residual is None else self.add_rms_norm(x, residual, *norm)

    def new_experts(
        self, experts: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> ExpertWeights:
        """A matrix with unset rows for each expert."""
        return ExpertWeights(self.new_weight(experts * outputs, inputs, dtype, device), experts)

    @abstractmethod
    def experts(self, x: Tensor, mixture: Mixture, chosen: Tensor, factors: Tensor) -> Tensor:
        """Sum over j of factors[i, j] * (D_e GATES[activation](G_e x_i, U_e x_i)), where e = chosen[i, j].

        The sum is float32, and rounded once. It is added up in an order that no other row of x changes; a row that is not finite
        spoils no other.

        Args:
            x: [num_tokens, hidden].
            mixture: G, U and D of each expert, and the activation.
            chosen: [num_tokens, k] int64, the experts of each token, which must exist and differ.
            factors: [num_tokens, k] float32.

        Returns:
            [num_tokens, hidden].
        """
        ...
