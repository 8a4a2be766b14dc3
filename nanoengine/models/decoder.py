"""Decoder: the decoder of all families, built from a `ModelConfig`.

It extends Qwen 3's with windows, GeGLU, mixtures of experts, recurrent states, and norms after each part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanoengine.core.attention import AttentionMetadata
from nanoengine.core.kernels import WeightSlot
from nanoengine.core.layers import Angles, Linear, RMSNorm, RotaryTable
from nanoengine.core.qwen3 import DenseAttention, DenseDecoder, DenseLayer
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.kernels.operations import Kernels
from nanoengine.models.layers.attention import (
    Attention,
    LateNormAttention,
    ScaledAttention,
    WideNormAttention,
    attention_spec,
)
from nanoengine.models.layers.delta_net import DeltaNet
from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.layer_attention import LayerAttention
from nanoengine.models.layers.mamba2 import Mamba2
from nanoengine.models.layers.mixer import Mixer
from nanoengine.models.layers.mlp import new_mlp
from nanoengine.models.layers.norm import NoNorm, OffsetNorm
from nanoengine.models.layers.parts import NoPart, SideBySide
from nanoengine.models.layers.per_layer import LayerEnd, PerLayerInputs
from nanoengine.models.layers.rotary import QueryScale, RotaryEmbedding, rotary_order
from nanoengine.models.layers.short_conv import ShortConv
from nanoengine.models.layers.slots import Reordered, Scaled
from nanoengine.models.model_config import ModelConfig, RopeConfig

MIXERS: dict[str, Callable[[ModelConfig, int, Factory], Mixer]]
MIXERS = {"short_conv": ShortConv, "delta_net": DeltaNet, "mamba2": Mamba2}
NAMES_OF_Q_AND_K = re.compile(r"\.(q_proj|k_proj|qkv_proj|q_norm|k_norm)\.")
"""Names of tensors whose rows are dimensions of the heads of q and k."""


def build_model(
    config: ModelConfig, kernels: Kernels, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """The model with unset parameters, on its device and in its dtype from the start."""
    return Decoder(config, Factory(kernels, dtype, device), backend)


class SelfAttention(DenseAttention):
    """Attention with sinks, output gates, fused tensors, partial or interleaved RoPE, and QK norms over all heads or without
    weights.
    """

    prefix = "self_attn"
    attention: Attention

    def __init__(self, config: ModelConfig, layer: int, factory: Factory, backend: AttentionBackend):
        rope, size = config.layer(layer).rope, config.head_dim
        q_size, kv_size = config.num_heads * size, config.num_kv_heads * size
        sizes = {"head": (size, size), "late": (size, size), "full": (q_size, kv_size)}
        if rope is not None:
            sizes["plain"] = (size, size)
        kinds = {"full": WideNormAttention, "late": LateNormAttention}
        norms = tuple(OffsetNorm(factory, config, width) for width in sizes.get(config.qk_norm or "", ()))
        kind = kinds.get(config.qk_norm or "", Attention)
        if config.query_growth if rope is None else rope.query_growth:
            kind = ScaledAttention
        self.config, self.rope, self.qkv_names, self.norms = config, rope, config.names.qkv, norms
        if config.qk_norm == "plain":
            self.norms = ()  # no tensors in a checkpoint
            for norm in norms:
                norm.weight.fill_(1.0)
        self.gate_size = q_size * config.has_output_gate  # the gates of all heads, before q
        widths = self.gate_size + q_size, kv_size, kv_size
        self.qkv_proj = Linear(factory, config.hidden_size, *widths, bias=config.qkv_bias)
        self.o_proj = Linear(factory, q_size, config.hidden_size, bias=config.o_bias)
        spec = attention_spec(config, layer)
        self.attention, self.kernels = kind(layer, config, spec, backend, *norms), factory.kernels
        self.attention.sinks = factory.floats(config.num_heads) if config.has_sinks else None

    def __call__(
        self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None, angles: Angles | None, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(norm, OffsetNorm)
        if self.gate_size:
            both, residual = norm.then_linear(hidden, residual, self.qkv_proj)
            heads = self.attention(both[:, self.gate_size :], angles, metadata).flatten(-2)
            return self.o_proj(self.kernels.sigmoid_gate(heads, both[:, : self.gate_size])), residual
        (x, fused_norm), linear = norm.before(hidden, residual), self.qkv_proj
        write = self.attention.writing(angles, metadata)
        q, residual = self.kernels.heads(x, linear.weight, linear.bias, write, **fused_norm)
        return self.o_proj(self.attention.attend(q, metadata).flatten(-2)), residual

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots = super().slots(prefix)
        if self.attention.sinks is not None:
            slots[f"{prefix}.sinks"] = self.attention.sinks
        size = self.config.head_dim
        order, rope = list(range(size)), self.rope
        if rope is not None:
            order = rotary_order(size, rope.rotary_dim, interleaved=rope.interleaved)
        is_in_order = order == list(range(size))
        # A checkpoint has q and gate of a head, and then of the next head.
        heads = range(0, 2 * self.gate_size, 2 * size)
        gates, queries = ([head + i for head in heads for i in dims] for dims in (range(size, 2 * size), order))
        for name, slot in slots.items():
            if self.gate_size and name.startswith(f"{prefix}.{self.qkv_names[0]}."):
                slots[name] = Reordered(slot, gates + queries, 1)
            elif not is_in_order and NAMES_OF_Q_AND_K.search(name):
                slots[name] = self._reordered(slot, order)
        return slots

    def _reordered(self, slot: WeightSlot, order: list[int]) -> WeightSlot:
        """A slot that reorders the heads of q and k; the heads of v, if they are in the same tensor, stay."""
        heads = self.config.num_heads + self.config.num_kv_heads
        return Reordered(slot, order, min(slot.shape[0] // self.config.head_dim, heads))


class DecoderLayer(DenseLayer):
    """A layer with norms before and after each part, and a factor of the outputs of its parts."""

    def __init__(
        self, config: ModelConfig, layer: int, factory: Factory, backend: AttentionBackend, rotary: RotaryTable | None
    ):
        self.names, self.residual_scale = config.names, config.residual_scale

        def norm(name: str | None) -> RMSNorm:
            return NoNorm(factory) if name is None else OffsetNorm(factory, config)

        facts, names = config.layer(layer), config.names
        # Parts have the calls of attention or of an MLP, and other weights.
        attention = LayerAttention if config.has_v_norm else SelfAttention
        self_attn: Any = attention(config, layer, factory, backend) if facts.attends else NoPart()
        if facts.mixer is not None:
            mixer = MIXERS[facts.mixer](config, layer, factory)
            self_attn = SideBySide(self_attn, mixer) if facts.attends else mixer
        mlp: Any = new_mlp(config, layer, factory) if facts.has_mlp else NoPart()
        attn_norm = norm(names.norm_before_attention if facts.attends or facts.mixer is not None else None)
        super().__init__(attn_norm, self_attn, norm(names.norm_before_mlp if facts.has_mlp else None), mlp, rotary)
        self.after_attention, self.after_mlp = norm(self.names.norm_after_attention), norm(self.names.norm_after_mlp)
        self.end = LayerEnd(config, factory) if config.has_layer_scale else None

    def __call__(
        self, hidden: Tensor, residual: Tensor | None, angles: Angles | None, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.self_attn(self.attn_norm, hidden, residual, angles, metadata)
        hidden, residual = self.mlp(self.mlp_norm, self._scaled(self.after_attention(hidden)), residual)
        return self._scaled(self.after_mlp(hidden)), residual

    def _scaled(self, hidden: Tensor) -> Tensor:
        return hidden if self.residual_scale == 1.0 else hidden * self.residual_scale

    @property
    def mixing(self) -> tuple[Any, ...]:
        """The parts before the MLP: one, or two in parallel."""
        return self.self_attn.parts if isinstance(self.self_attn, SideBySide) else (self.self_attn,)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots = {f"{prefix}.{name}.weight": norm.slot() for name, norm in self.norms().items()} | self.mlp.slots(prefix)
        for part in self.mixing:
            slots |= part.slots(f"{prefix}.{part.prefix}")
        return slots if self.end is None else slots | self.end.slots(prefix)

    def norms(self) -> dict[str, RMSNorm]:
        names = self.names
        norms = (
            (names.norm_before_attention, self.attn_norm),
            (names.norm_after_attention, self.after_attention),
            (names.norm_before_mlp, self.mlp_norm),
            (names.norm_after_mlp, self.after_mlp),
        )
        return {name: norm for name, norm in norms if name is not None and not isinstance(norm, NoNorm)}


class Decoder(DenseDecoder):
    """A decoder with several kinds of rotation, per-layer embeddings, and factors and caps of embeddings and logits."""

    config: ModelConfig
    layers: Sequence[DecoderLayer]

    def __init__(self, config: ModelConfig, factory: Factory, backend: AttentionBackend):
        facts = [config.layer(number) for number in range(config.num_layers)]
        ropes, sizes = [layer.rope for layer in facts], [layer.head_dim or config.head_dim for layer in facts]
        rotaries: dict[RopeConfig | None, RotaryTable | None] = {
            rope: None if rope is None else RotaryEmbedding(size, rope, factory.device)
            for rope, size in dict(zip(ropes, sizes, strict=True)).items()
        }
        if config.query_growth:
            rotaries[None] = QueryScale(config.query_growth, config.query_period, factory.device)
        layers = [DecoderLayer(config, number, factory, backend, rotaries[rope]) for number, rope in enumerate(ropes)]
        super().__init__(config, factory, layers, OffsetNorm(factory, config))
        self.per_layer = PerLayerInputs(config, factory) if config.per_layer_size else None
        self.kv_layers = [number if layer.kv_layer is None else layer.kv_layer for number, layer in enumerate(facts)]
        self.matrices = factory.matrices
        self.embedding_scale = config.embedding_scale
        if config.embedding_scale_is_rounded:
            self.embedding_scale = torch.tensor(config.embedding_scale, dtype=factory.dtype, device="cpu").item()

    @property
    def mixers(self) -> dict[int, Mixer]:
        """The mixers by the numbers of their layers."""
        layers = enumerate(self.layers)
        return {number: part for number, layer in layers for part in layer.mixing if isinstance(part, Mixer)}

    def checkpoint_tensors(self) -> dict[str, WeightSlot]:
        slots = super().checkpoint_tensors() | ({} if self.per_layer is None else self.per_layer.slots())
        for ending, factors, rows in self.config.factors:
            column = torch.tensor(factors, dtype=torch.float32, device="cpu")[:, None]
            if rows:
                column = column.repeat_interleave(torch.tensor(rows, dtype=torch.int64, device="cpu"), dim=0)
            slots |= {name: Scaled(slot, column) for name, slot in slots.items() if name.endswith(ending)}
        for ours, theirs in self.config.names.replaced:
            slots = {name.replace(ours, theirs): slot for name, slot in slots.items()}
        return slots

    def embed(self, input_ids: Tensor) -> Tensor:
        hidden = super().embed(input_ids)
        return hidden if self.embedding_scale == 1.0 else hidden * self.embedding_scale

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]) -> Tensor:
        if not self.config.has_layer_scale:
            return super().forward(input_ids, positions, metadata)
        hidden, residual = self.embed(input_ids), None
        per_layer = None if self.per_layer is None else self.per_layer(input_ids, hidden)
        angles = {rotary: rotary(positions) for rotary in self.rotaries}
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            assert layer.end is not None
            rotary, of_layer = layer.rotary, metadata[self.kv_layers[number]]
            hidden, residual = layer(hidden, residual, None if rotary is None else angles[rotary], of_layer)
            hidden, residual = layer.end(hidden, residual, None if per_layer is None else per_layer[:, number])
        assert residual is not None
        return self.norm.add_and_norm(hidden, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits, cap = super().compute_logits(hidden), self.config.logits_soft_cap
        if self.config.logits_divisor != 1.0:
            logits.div_(self.config.logits_divisor)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
