"""A sparse MLP: a router chooses experts for every token, and their outputs are added up by how likely it thinks them.

Mixtral (Jiang et al., 2024) and Qwen3-MoE (Qwen3 technical report, 2025), in the numerics and tensor names of transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.kernels.interface import Destination
from nanoengine.layers.factory import Factory
from nanoengine.layers.linear import Linear
from nanoengine.layers.norm import RMSNorm


class Experts:
    """Stands where an MLP would, behind the same norm.

    The router's logits have the dtype of the model, its probabilities and factors are float32.

    Args:
        factory: makes the weights.
        hidden_size: width of a token.
        intermediate_size: width of one expert.
        num_experts, num_chosen: experts that there are, and those that a token has.
        normalize: whether the factors of a token are divided by their sum.
    """

    def __init__(
        self,
        factory: Factory,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_chosen: int,
        *,
        normalize: bool,
    ):
        self.kernels = factory.kernels
        self.num_experts, self.num_chosen, self.normalize = num_experts, num_chosen, normalize
        self.router = Linear(factory, hidden_size, num_experts)
        new, placed = factory.kernels.new_experts, (factory.dtype, factory.device)
        self.gate = new(num_experts, intermediate_size, hidden_size, *placed)
        self.up = new(num_experts, intermediate_size, hidden_size, *placed)
        self.down = new(num_experts, hidden_size, intermediate_size, *placed)

    def __call__(self, norm: RMSNorm, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(its output for the norm of the next residual, that residual): [num_tokens, hidden_size] each.

        The residual that is given may be overwritten.
        """
        x, residual = norm.add_and_norm(hidden, residual)
        chosen, factors = self.route(x)
        return self.kernels.experts(x, self.gate, self.up, self.down, chosen, factors), residual

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens, hidden_size] -> [num_tokens, num_chosen] experts, the likeliest first, and as many factors."""
        probabilities = self.router(x).softmax(-1, dtype=torch.float32)
        factors, chosen = probabilities.topk(self.num_chosen)
        if self.normalize:
            factors = factors / factors.sum(-1, keepdim=True)
        return chosen, factors

    def parts(self, prefix: str, gate: str, up: str, down: str) -> dict[str, Destination]:
        """Checkpoint name -> place: of the router, `prefix.gate`, and of each expert's matrices, `prefix.experts.i.name`."""
        places = self.router.parts(prefix, "gate")
        for name, weights in ((gate, self.gate), (up, self.up), (down, self.down)):
            for i in range(self.num_experts):
                places[f"{prefix}.experts.{i}.{name}.weight"] = weights.expert(i)
        return places
