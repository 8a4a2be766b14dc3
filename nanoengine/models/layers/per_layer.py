"""Per-layer embeddings, which are added after the MLP of a layer, and the scale of a layer (Gemma 4)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanoengine.core.kernels import WeightSlot
from nanoengine.core.layers import Linear
from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.norm import OffsetNorm
from nanoengine.models.layers.slots import Changed
from nanoengine.models.model_config import ModelConfig


class PerLayerInputs:
    """The mean of a token's rows in a table of all layers, and of a projection of its embedding.

    The table is a weight like the embedding: in the dtype of the model, or in the format of its file.
    """

    def __init__(self, config: ModelConfig, factory: Factory):
        self.kernels, self.vocab_size, self.size = factory.kernels, config.vocab_size, config.per_layer_size
        width = config.num_layers * self.size
        self.table, self.projection = (
            factory.weight(width, config.vocab_size),
            Linear(factory, config.hidden_size, width),
        )
        self.norm = OffsetNorm(factory, config, self.size)
        self.norm.eps *= config.hidden_size  # the norm cancels the factor of the projection, except in its epsilon

    def __call__(self, input_ids: Tensor, embedded: Tensor) -> Tensor:
        """[num_tokens] ids and their scaled embeddings [num_tokens, hidden_size] -> [num_tokens, num_layers, size]."""
        rows = self.kernels.embed(input_ids, self.table).unflatten(-1, (-1, self.size)) * math.sqrt(self.size)
        return (self.norm(self.projection(embedded).unflatten(-1, (-1, self.size))) + rows) * math.sqrt(0.5)

    def slots(self) -> dict[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {"model.embed_tokens_per_layer.weight": self.table.rows(0, self.vocab_size)}
        slots |= self.projection.slots("model", "per_layer_model_projection")
        return slots | {"model.per_layer_projection_norm.weight": self.norm.slot()}


class LayerEnd:
    """The last part of a layer: a gate on its per-layer embedding, if there is one, and the scale of the layer."""

    def __init__(self, config: ModelConfig, factory: Factory):
        self.kernels, self.activation, self.gate = factory.kernels, config.activation, None
        self.scale = factory.floats()
        if size := config.per_layer_size:
            self.gate, self.up = Linear(factory, config.hidden_size, size), Linear(factory, size, config.hidden_size)
            self.norm = OffsetNorm(factory, config)

    def __call__(self, hidden: Tensor, residual: Tensor, per_layer: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.gate is not None:
            assert per_layer is not None
            residual = residual + hidden
            gated = self.kernels.gate(torch.cat((self.gate(residual), per_layer), 1), self.activation)
            hidden = self.norm(self.up(gated))
        return hidden * self.scale, residual * self.scale

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {f"{prefix}.layer_scalar": Changed(self.scale, Tensor.squeeze, (1,))}
        if self.gate is None:
            return slots
        slots |= self.gate.slots(prefix, "per_layer_input_gate") | self.up.slots(prefix, "per_layer_projection")
        return slots | {f"{prefix}.post_per_layer_input_norm.weight": self.norm.slot()}
