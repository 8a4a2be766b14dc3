"""Modules that replace those of transformers with the same results: products, embeddings, norms and experts.

Each has parameters with the names and shapes of the replaced module, without memory. An assigned tensor is copied at once to the
engine's form of the weight, so a loader fills them tensor by tensor, and no weight is in memory twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nanoengine.core.layers import RMSNorm
from nanoengine.kernels.operations import Mixture
from nanoengine.models.layers.factory import Factory
from nanoengine.models.loader import Quantizer, fill


class Shell(nn.Parameter):
    """A parameter without memory.

    Attributes:
        weight: the matrix with its values, common to tied modules.
        device: of the loaded values; some models move their inputs there.
    """

    weight: Any = None
    device = torch.device("meta")

    def __new__(cls, like: Tensor) -> Shell:
        empty = torch.empty(like.shape, dtype=like.dtype, device="meta")
        return torch.Tensor._make_subclass(cls, empty, False)


class Replacement(nn.Module):
    """A module that assigns the parameters in `shells` by `assign`."""

    shells: Sequence[str] = ("weight",)

    def __init__(self, replaced: nn.Module):
        super().__init__()
        for name in self.shells:
            self._parameters[name] = Shell(replaced.get_parameter(name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.shells:
            super().__setattr__(name, value)
            return
        shell = self._parameters[name]
        assert isinstance(shell, Shell)
        shell.__dict__["_is_hf_initialized"] = True  # transformers initializes no parameter that says so
        if isinstance(value, Shell):
            self._parameters[name] = value  # tied
        else:
            self.assign(name, value.data)

    def assign(self, name: str, values: Tensor) -> None:
        raise NotImplementedError


class LinearGroup:
    """The fused matrix of linear layers of one input, computed by one product.

    Args:
        sizes: outputs of each member.
        dtype: of the outputs; None: that of the model.
    """

    bias: Tensor | None = None
    _input: Tensor | None = None
    _outputs: Sequence[Tensor] = ()

    def __init__(
        self, factory: Factory, quantize: Quantizer | None, inputs: int, sizes: Sequence[int], dtype: torch.dtype | None
    ):
        self.factory, self.quantize, self.inputs, self.sizes, self.dtype = factory, quantize, inputs, list(sizes), dtype
        self.members: list[EngineLinear] = []
        self.weight: Any = None  # made when it is filled: a tied layer needs none

    def fill(self, member: int, values: Tensor) -> None:
        if self.weight is None:
            self.weight = self.factory.weight(self.inputs, *self.sizes)
        fill(values, self.weight.rows(sum(self.sizes[:member]), self.sizes[member]), self.factory.dtype, self.quantize)

    def finish(self) -> None:
        """After loading: use the matrix of a tied member, and concatenate the biases."""
        if self.weight is None:
            self.weight = self.members[0].get_parameter("weight").weight  # type: ignore[attr-defined]
        biases = [member.bias for member in self.members]
        self.bias = None if biases[0] is None else torch.cat([bias.data for bias in biases])

    def product(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [num_tokens, outputs of all members]."""
        flat = x.reshape(-1, self.inputs).to(self.factory.dtype)
        return self.factory.kernels.product(flat, self.weight, self.bias, dtype=self.dtype)[0]

    def output(self, x: Tensor, member: int) -> Tensor:
        """[..., inputs] -> [..., outputs of a member]. The other outputs are cached for the next members with the same x."""
        if x is not self._input:
            self._input, self._outputs = x, self.product(x).split(self.sizes, dim=-1)
        output = self._outputs[member]
        if member == len(self.sizes) - 1:
            self._input, self._outputs = None, ()
        return output.view(*x.shape[:-1], -1)


class EngineLinear(Replacement):
    """y = x W^T + b, as a member of a group; `is_turned`: the tensor is W^T, as in GPT-2's Conv1D."""

    def __init__(self, replaced: Any, group: LinearGroup, *, is_turned: bool):
        super().__init__(replaced)
        self.group, self.index, self.is_turned, self.bias = group, len(group.members), is_turned, replaced.bias
        self.in_features, self.out_features = group.inputs, group.sizes[self.index]
        group.members.append(self)

    def assign(self, name: str, values: Tensor) -> None:
        self.group.fill(self.index, values.T.contiguous() if self.is_turned else values)
        self.get_parameter(name).weight = self.group.weight  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.group.output(x, self.index)


class EngineEmbedding(Replacement):
    """An embedding whose matrix a tied head may use."""

    def __init__(self, replaced: Any, factory: Factory, quantize: Quantizer | None):
        super().__init__(replaced)
        self.factory, self.quantize = factory, quantize
        self.num_embeddings, self.embedding_dim = replaced.weight.shape

    def assign(self, name: str, values: Tensor) -> None:
        weight = self.factory.weight(self.embedding_dim, self.num_embeddings)
        fill(values, weight.rows(0, self.num_embeddings), self.factory.dtype, self.quantize)
        self.get_parameter(name).weight = weight  # type: ignore[attr-defined]

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.get_parameter("weight").weight  # type: ignore[attr-defined]
        return self.factory.kernels.embed(ids.reshape(-1), weight).view(*ids.shape, -1)


class EngineNorm(Replacement):
    """An RMSNorm; `offset` is added to assigned weights (Gemma's are less by 1)."""

    def __init__(self, replaced: nn.Module, factory: Factory, eps: float, offset: float):
        self.__dict__["shells"] = [name for name, _ in replaced.named_parameters()]
        super().__init__(replaced)
        (weight,) = replaced.parameters()
        self.norm, self.offset = RMSNorm(factory, len(weight), eps), offset

    def assign(self, name: str, values: Tensor) -> None:
        self.norm.weight.copy_(values.float() + self.offset)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class EngineExperts(Replacement):
    """A mixture of gated MLPs, by (hidden states, experts of each token, factors)."""

    shells = "gate_up_proj", "down_proj"

    def __init__(self, replaced: Any, factory: Factory, quantize: Quantizer | None, activation: str):
        super().__init__(replaced)
        self.is_transposed, self.is_concatenated = replaced.is_transposed, replaced.is_concatenated
        self.factory, self.quantize, self.activation = factory, quantize, activation
        self.parts: dict[str, Any] = {}

    def assign(self, name: str, values: Tensor) -> None:
        values = values.transpose(1, 2) if self.is_transposed else values
        parts = {"down": values}
        if name == "gate_up_proj":
            gates, ups = values.chunk(2, 1) if self.is_concatenated else (values[:, ::2], values[:, 1::2])
            parts = {"gate": gates, "up": ups}
        for part, stacked in parts.items():
            self.parts[part] = self.factory.experts(*stacked.shape)
            for index, matrix in enumerate(stacked):
                fill(matrix.contiguous(), self.parts[part].expert(index), self.factory.dtype, self.quantize)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        mixture = Mixture(self.parts["gate"], self.parts["up"], self.parts["down"], self.activation)
        chosen, factors = top_k_index.reshape(len(x), -1).long(), top_k_weights.reshape(len(x), -1).float()
        return self.factory.kernels.experts(x, mixture, chosen, factors).view(hidden_states.shape)
