"""Fused parts: attention with its projections, gated MLPs, and tables of rotations, each in few calls of the kernels.

A part is recognized by its results. A pass of a few tokens records the inputs and outputs of each module; if operations of this
engine reproduce the output, they replace the `forward` of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanoengine.core.layers import Angles, apply_rotary
from nanoengine.kernels.reference.gates import ACTIVATIONS
from nanoengine.models.layers.attention import Attention as PagedAttention
from nanoengine.models.transformers_backend.interface import AttentionInterface, values_alone
from nanoengine.models.transformers_backend.module_calls import ModuleCall
from nanoengine.models.transformers_backend.modules import EngineLinear, EngineNorm, LinearGroup

POSITIONS_AT_ONCE = 8192
"""Positions that are computed at a time for a table of rotations."""


class Rotation(tuple[Tensor, ...]):
    """(cosines, sines) of all dimensions, as a rotary module returns them; `halves`: of one half, as kernels read them."""

    halves: Angles


class RotaryTables:
    """Tables of the outputs of a module of positions, for all positions; replaces its `forward`."""

    def __init__(self, module: Any):
        self.forward = module.forward
        self.calls: dict[tuple[Any, ...], ModuleCall] = {}
        self.tables: dict[tuple[Any, ...], Tensor] = {}

    @staticmethod
    def key(inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The inputs of a call beside tensors, such as the type of a layer."""
        return tuple(value for value in inputs if not isinstance(value, Tensor))

    def prepare(self, length: int) -> None:
        """Compute the tables; angles that depend on the longest sequence of a batch are those of `length`."""
        for key, call in self.calls.items():
            parts = []
            for start in range(0, length, POSITIONS_AT_ONCE):
                end = min(start + POSITIONS_AT_ONCE, length)
                positions = torch.arange(start, end + 1, dtype=torch.int64, device="cpu")
                positions[-1] = length - 1
                parts.append(self._compute(call, positions)[:-1])
            self.tables[key] = torch.cat(parts)

    def _compute(self, call: ModuleCall, positions: Tensor) -> Tensor:
        """[num_positions, 2, width] float32."""

        def at_positions(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.dtype.is_floating_point:
                return value.new_zeros((1, 1, 1), dtype=torch.float32)
            return positions.to(value.device)[None]

        return torch.cat(self.forward(*map(at_positions, call.inputs))).transpose(0, 1).contiguous()

    def __call__(self, *args: Any, **kwargs: Any) -> Rotation:
        inputs = [*args, *kwargs.values()]
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        positions = next(tensor for tensor in tensors if not tensor.dtype.is_floating_point)
        dtype = next(tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point)
        rows = self.tables[self.key(inputs)].index_select(0, positions[0])
        cos, sin = rows.split(1, dim=1)  # [num_tokens, 1, width]
        rotation = Rotation(part.transpose(0, 1).to(dtype) for part in (cos, sin))
        half = rows.shape[2] // 2
        rotation.halves = cos[..., :half], sin[..., :half]
        return rotation


def fuse_rotations(calls: Sequence[ModuleCall], positions: Tensor) -> list[RotaryTables]:
    """Replace the modules whose inputs are a tensor and the positions, and whose outputs are (cosines, sines)."""
    rotations: dict[nn.Module, RotaryTables] = {}
    for call in calls:
        tensors = [value for value in call.inputs if isinstance(value, Tensor)]
        of_positions = len(tensors) == 2 and torch.equal(tensors[1], positions[None])
        output = call.output if isinstance(call.output, tuple) else ()
        if not of_positions or len(output) != 2 or list(call.module.parameters()):
            continue
        if all(part.dim() == 3 and part.shape[:2] == (1, len(positions)) for part in output):
            rotations.setdefault(call.module, RotaryTables(call.module)).calls[RotaryTables.key(call.inputs)] = call
    for module, tables in rotations.items():
        tables.prepare(int(positions.max()) + 1)
        module.forward = tables
    return list(rotations.values())


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """The projections to q, k and v, RoPE, attention and the output projection; replaces the `forward` of a module."""

    inputs: LinearGroup
    outputs: LinearGroup
    paged: PagedAttention
    attention: AttentionInterface
    rotates: bool

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        inputs = [*args, *kwargs.values()]
        x = next(value for value in inputs if isinstance(value, Tensor) and value.dtype.is_floating_point)
        angles = next(value for value in inputs if isinstance(value, Rotation)).halves if self.rotates else None
        heads = self.paged(self.inputs.product(x), angles, self.attention.next_layer())
        return self.outputs.product(heads.flatten(-2)).view(x.shape), None


def fused_attention(
    call: ModuleCall, heads: Sequence[Tensor], attention: AttentionInterface, paged: Callable[..., PagedAttention]
) -> FusedAttention | None:
    """The fused form of a module with attention; None if it computes anything else.

    Args:
        call: of the module, in a pass where each token attends to itself only.
        heads: the query, key and value of its attention, [1, heads, num_tokens, head_dim].
        attention: of the model.
        paged: makes the paged attention of this layer, with norms of q and k or none.
    """
    linears = [inner.module for inner in call.of(EngineLinear)]
    norms = [inner.module.norm for inner in call.of(EngineNorm)]
    x = next((value for value in call.inputs if isinstance(value, Tensor) and value.dtype.is_floating_point), None)
    if len(linears) != 4 or len(norms) not in (0, 2) or x is None or call.of(EngineLinear)[0].inputs[0] is not x:
        return None
    inputs, outputs = linears[0].group, linears[3].group
    is_pair = isinstance(call.output, tuple) and len(call.output) == 2 and call.output[1] is None
    if linears[:3] != inputs.members or len(outputs.sizes) != 1 or not is_pair:
        return None
    query, key, value = (part[0].transpose(0, 1) for part in heads)
    counts, size = [part.shape[1] for part in (query, key, value)], query.shape[-1]
    qkv = inputs.product(x)
    if qkv.shape[1] != sum(counts) * size or any(len(norm.weight) != size for norm in norms):
        return None
    q, k, v = qkv.unflatten(-1, (-1, size)).split(counts, dim=1)
    q, k = (norm(part) for norm, part in zip(norms, (q, k), strict=True)) if norms else (q, k)
    alone = values_alone(heads[0], heads[2])[0].flatten(-2)
    if not _is_close(v, value) or not _is_close(outputs.product(alone), call.output[0][0]):
        return None
    if _is_close(q, query) and _is_close(k, key):
        return FusedAttention(inputs, outputs, paged(*norms), attention, rotates=False)
    for angles in (value.halves for value in call.inputs if isinstance(value, Rotation)):
        is_whole = angles[0].shape[-1] * 2 == size
        if is_whole and _is_close(apply_rotary(q, angles), query) and _is_close(apply_rotary(k, angles), key):
            return FusedAttention(inputs, outputs, paged(*norms), attention, rotates=True)
    return None


@dataclass(frozen=True, slots=True)
class FusedMLP:
    """down(activation(gate, up)); replaces the `forward` of a module."""

    gate_up: LinearGroup
    down: LinearGroup
    activation: str

    def gated(self, x: Tensor) -> Tensor:
        flat, kernels = x.reshape(-1, x.shape[-1]), self.gate_up.factory.kernels
        return kernels.product(flat, self.gate_up.weight, activation=self.activation)[0]

    def __call__(self, x: Tensor) -> Tensor:
        return self.down.product(self.gated(x)).view(x.shape)


def fused_mlp(call: ModuleCall) -> FusedMLP | None:
    """The fused form of a module that is a gated MLP without biases; None if it computes anything else."""
    linears = call.of(EngineLinear)
    if len(linears) != 3 or len(call.inputs) != 1 or linears[0].inputs[0] is not call.inputs[0]:
        return None
    gate_up, down = linears[0].module.group, linears[2].module.group
    are_pair = [linear.module for linear in linears[:2]] == gate_up.members and len(down.sizes) == 1
    if not are_pair or gate_up.bias is not None or linears[2].output is not call.output:
        return None
    forms = (FusedMLP(gate_up, down, activation) for activation in ACTIVATIONS)
    between = linears[2].inputs[0].reshape(-1, down.inputs)
    return next((mlp for mlp in forms if _is_close(mlp.gated(call.inputs[0]), between)), None)


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    tolerance = 1e-4 if theirs.dtype is torch.float32 else 2e-2
    return bool((ours.float() - theirs.float()).abs().max() <= tolerance * theirs.float().abs().max())
