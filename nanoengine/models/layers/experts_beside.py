"""An MLP and a mixture of experts on the same residual, each with a norm of its output (Gemma 4)."""

from __future__ import annotations

from torch import Tensor

from nanoengine.core.kernels import WeightSlot
from nanoengine.core.layers import RMSNorm
from nanoengine.core.qwen3 import DenseMLP
from nanoengine.models.layers.experts import Experts
from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.norm import OffsetNorm
from nanoengine.models.layers.slots import Changed
from nanoengine.models.model_config import ModelConfig


class ExpertsBesideMLP:
    """An MLP with experts beside it, with the calls of an MLP. The router has a separate norm of the residual."""

    def __init__(self, config: ModelConfig, mlp: DenseMLP, factory: Factory):
        assert config.experts is not None
        self.mlp, self.size = mlp, config.hidden_size
        norms = (OffsetNorm(factory, config) for _ in range(4))
        self.after_mlp, self.before_experts, self.after_experts, self.before_router = norms
        self.experts = Experts(config, factory)
        self.scales = factory.floats(config.experts.num_experts)  # of the factors of each

    def __call__(self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        dense, residual = self.mlp(norm, hidden, residual)
        chosen, factors = self.experts.route(self.before_router(residual))
        factors = factors * self.scales.expand(len(chosen), -1).gather(1, chosen)
        x = self.before_experts(residual)
        routed = self.experts.kernels.experts(x, self.experts.mixture, chosen, factors)
        return self.after_mlp(dense) + self.after_experts(routed), residual

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        norms = self.after_mlp, self.before_experts, self.after_experts
        names = "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"
        named = {f"{prefix}.{name}.weight": norm.slot() for name, norm in zip(names, norms, strict=True)}
        slots = self.mlp.slots(prefix) | named | self.experts.slots_below(prefix)
        of_router = Changed(self.before_router.weight, lambda scale: scale.float() * self.size**-0.5)
        return slots | {f"{prefix}.router.scale": of_router, f"{prefix}.router.per_expert_scale": self.scales}
