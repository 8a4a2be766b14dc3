"""Other parts of a layer: an absent part, parallel attention and mixer, and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nanoengine.core.attention import AttentionMetadata
from nanoengine.core.kernels import WeightSlot
from nanoengine.core.layers import Angles, Linear, RMSNorm
from nanoengine.core.qwen3 import DenseMLP
from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.mixer import Mixer
from nanoengine.models.layers.norm import OffsetNorm
from nanoengine.models.model_config import ModelConfig


class NoPart:
    """An absent attention or MLP: the identity."""

    prefix = ""

    def __call__(
        self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None, *more: object
    ) -> tuple[Tensor, Tensor | None]:
        return hidden, residual

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return {}


class SideBySide:
    """Parallel attention and mixer of one normed input; their outputs are added (Falcon H1)."""

    def __init__(self, attention: Any, mixer: Mixer):
        self.parts = attention, mixer

    def __call__(
        self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None, angles: Angles | None, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        attention, mixer = self.parts
        seen, residual = attention(norm, hidden, residual, angles, metadata)
        mixed, residual = mixer(norm, residual, None, angles, metadata)
        return seen + mixed, residual


class SquaredMLP(DenseMLP):
    """An MLP without a gate: see `SQUARED`."""

    def __init__(self, config: ModelConfig, factory: Factory):
        width = config.intermediate_size
        self.up_proj = Linear(factory, config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = Linear(factory, width, config.hidden_size, bias=config.mlp_bias)

    def __call__(self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        assert isinstance(norm, OffsetNorm)
        up, residual = norm.then_linear(hidden, residual, self.up_proj)
        return self.down_proj(up.relu().square_()), residual

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return self.up_proj.slots(f"{prefix}.mlp", "up_proj") | self.down_proj.slots(f"{prefix}.mlp", "down_proj")
