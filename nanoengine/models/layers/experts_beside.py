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
        names = config.names
        self.mlp, self.names, self.size = mlp, names, config.hidden_size

        def norm() -> OffsetNorm:
            return OffsetNorm(factory, config.hidden_size, config.rms_norm_eps, config.norm_offset)

        self.after_mlp, self.before_experts, self.after_experts, self.before_router = (norm() for _ in range(4))
        self.experts = Experts(factory, config.hidden_size, config.experts, config.activation)
        self.scales = factory.floats(config.experts.num_experts)  # of the factors of each

    def __call__(self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        dense, residual = self.mlp(norm, hidden, residual)
        chosen, factors = self.experts.route(self.before_router(residual))
        factors = factors * self.scales.expand(len(chosen), -1).gather(1, chosen)
        x = self.before_experts(residual)
        routed = self.experts.kernels.experts(x, self.experts.mixture, chosen, factors)
        return self.after_mlp(dense) + self.after_experts(routed), residual

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        norms = {"post_feedforward_layernorm_1": self.after_mlp}
        norms |= {
            "pre_feedforward_layernorm_2": self.before_experts,
            "post_feedforward_layernorm_2": self.after_experts,
        }
        slots = self.mlp.slots(prefix) | {f"{prefix}.{name}.weight": norm.slot() for name, norm in norms.items()}
        slots |= self.experts.slots(prefix, self.names.router, self.names.expert_gate_up_down)
        of_router = Changed(self.before_router.weight, lambda scale: scale.float() * self.size**-0.5)
        return slots | {f"{prefix}.router.scale": of_router, f"{prefix}.router.per_expert_scale": self.scales}
