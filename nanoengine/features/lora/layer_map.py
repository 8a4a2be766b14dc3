"""Layer map: the rows of each linear layer of a checkpoint in a matrix of the model, where adapters add to them.

A matrix often has several linear layers, and its rows may have another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nanoengine.core.weights import EMBEDDING, HEAD
from nanoengine.kernels.reference.attention import TorchAttention
from nanoengine.kernels.reference.operations import RowMajor, TorchKernels
from nanoengine.models.decoder import build_model
from nanoengine.models.layers.slots import Scaled
from nanoengine.models.model_config import ModelConfig, StateConfig


@dataclass(frozen=True)
class LinearLayer:
    """Outputs [first, first + count) of a matrix. Output i of them is output `order[i]` in the checkpoint; so is `input_order`
    for the inputs, if their order differs.
    """

    matrix: int  # in `Decoder.matrices`
    first: int
    count: int
    inputs: int
    order: Tensor  # [count] int64
    input_order: Tensor | None = None  # [inputs] int64
    factors: Tensor | None = None  # [count or 1, 1] float32, of the outputs in the checkpoint


class _RecordingKernels(TorchKernels):
    """Kernels whose matrices have no memory.

    Attributes:
        copied: (matrix, first row, source) of each copy to rows of a matrix.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[tuple[RowMajor, int, Tensor]] = []

    def new_weight(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> RowMajor:
        matrix = RowMajor(outputs, inputs, torch.float32, torch.device("meta"))

        def rows(first: int, count: int) -> Any:
            shape, record = torch.Size((count, inputs)), self.copied.append
            return SimpleNamespace(shape=shape, copy_=lambda source: record((matrix, first, source)))

        matrix.rows = rows  # type: ignore[method-assign]
        return matrix


def find_linear_layers(config: ModelConfig, starts: Mapping[str, tuple[int, int]] = {}) -> dict[str, LinearLayer]:
    """The linear layers that may have an adapter, by name: all but embeddings, heads and experts.

    They are recorded while a model without memory is loaded, whose matrices have the order of those of the real one. For a
    decoder of transformers, `starts` has the matrix and its first row for each name; without, only the sizes are right.
    """
    if config.linears:
        return {
            name: LinearLayer(
                *starts.get(name, (0, 0)), outputs, inputs, torch.arange(outputs, dtype=torch.int64, device="cpu")
            )
            for name, outputs, inputs in config.linears
        }
    kernels = _RecordingKernels()
    model = build_model(config, kernels, TorchAttention(1), torch.float32, torch.device("meta"))
    layers: dict[str, LinearLayer] = {}
    for name, slot in model.checkpoint_tensors().items():
        if name.endswith(".weight") and len(slot.shape) == 2 and name not in (EMBEDDING, HEAD):
            slot, factors = (slot.slot, slot.factors) if isinstance(slot, Scaled) else (slot, None)
            slot.copy_(torch.arange(slot.shape[0], dtype=torch.int64, device="cpu")[:, None])
            for matrix, first, source in kernels.copied:
                if matrix in model.matrices:  # not of an expert
                    where, order, inputs = model.matrices.index(matrix), source[:, 0], matrix.shape[1]
                    layer = LinearLayer(where, first, len(order), inputs, order, None, factors)
                    layers[name.removesuffix(".weight")] = layer
            kernels.copied.clear()
    facts = config.states
    if facts is not None and facts.is_tiled and facts.num_heads > facts.num_groups:
        layers |= {name: _tiled(layer, name.rpartition(".")[2], facts) for name, layer in layers.items()}
    return layers


def _tiled(layer: LinearLayer, part: str, facts: StateConfig) -> LinearLayer:
    """The layer with Hugging Face's value heads, ordered by groups, in the order of a GGUF file."""
    size = dict.fromkeys(("in_proj_qkv", "in_proj_z", "out_proj"), facts.width) | {"in_proj_b": 1, "in_proj_a": 1}
    if part not in size:
        return layer
    rows = torch.arange(facts.num_heads * size[part], dtype=torch.int64, device="cpu")
    heads = rows.view(facts.num_groups, -1, size[part]).transpose(0, 1).flatten()
    if part == "out_proj":
        return replace(layer, input_order=heads)
    first = layer.count - len(heads)  # queries and keys
    before = torch.arange(first, dtype=torch.int64, device="cpu")
    return replace(layer, order=torch.cat([before, first + heads])[layer.order])
