"""The part of a layer after attention: an MLP, experts, or both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from nanoengine.core.layers import RMSNorm
from nanoengine.core.qwen3 import DenseMLP
from nanoengine.models.layers.experts import SQUARED, Experts, ExpertsAndShared
from nanoengine.models.layers.experts_beside import ExpertsBesideMLP
from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.norm import OffsetNorm
from nanoengine.models.layers.parts import SquaredMLP
from nanoengine.models.model_config import ModelConfig


class MLP(DenseMLP):
    """A gated MLP with biases, other activations, and fused tensors."""

    def __init__(self, config: ModelConfig, factory: Factory):
        super().__init__(config, factory, bias=config.mlp_bias)
        self.kernels, self.activation, self.gate_up_names = factory.kernels, config.activation, config.names.gate_up

    def __call__(self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        linear, down = self.gate_up_proj, self.down_proj
        assert isinstance(norm, OffsetNorm)
        if linear.bias is None:
            x, fused_norm = norm.before(hidden, residual)
            return self.kernels.mlp(x, linear.weight, down.weight, self.activation, **fused_norm)
        both, residual = norm.then_linear(hidden, residual, linear)
        return down(self.kernels.gate(both, self.activation)), residual


def new_mlp(config: ModelConfig, layer: int, factory: Factory) -> Any:
    """The part after attention of layer `layer`."""
    facts, experts = config.layer(layer), config.experts
    is_beside = experts is not None and experts.beside_mlp
    if experts is not None and facts.has_experts and not is_beside:
        return (ExpertsAndShared if experts.shared_size else Experts)(config, factory)
    dense = SquaredMLP if config.activation == SQUARED else MLP
    mlp = dense(replace(config, intermediate_size=facts.intermediate_size or config.intermediate_size), factory)
    return ExpertsBesideMLP(config, mlp, factory) if is_beside else mlp
