"""Decoder: the transformer that all supported families share, built from the facts of a `ModelConfig`.

Grouped-query attention with rotary embeddings, over all tokens or those of a window; SwiGLU, GeGLU or a mixture of experts;
RMSNorm before each part, behind it, or both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from nanoengine.attention.backend import AttentionBackend
from nanoengine.core.attention import AttentionMetadata, AttentionSpec
from nanoengine.kernels.interface import Destination, Kernels
from nanoengine.layers.attention import Attention
from nanoengine.layers.embedding import Embedding, LMHead
from nanoengine.layers.experts import Experts
from nanoengine.layers.factory import Factory
from nanoengine.layers.linear import Linear
from nanoengine.layers.norm import RMSNorm
from nanoengine.layers.reordered import Reordered
from nanoengine.layers.rotary import Angles, RotaryEmbedding, rotary_order
from nanoengine.model_config import ModelConfig, RopeConfig
from nanoengine.models.checkpoint import EMBEDDING, HEAD


def build_model(
    config: ModelConfig, kernels: Kernels, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """The model with unset parameters, on its device and in its dtype from the start: nothing is made twice."""
    return Decoder(config, Factory(kernels, dtype, device), backend)


def attention_specs(config: ModelConfig) -> list[AttentionSpec]:
    """What each layer of the model asks of attention; a backend is chosen by it before the model is built."""
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    layers = map(config.layer, range(config.num_layers))
    return [
        AttentionSpec(scale, layer.window, sinks=config.has_sinks, soft_cap=config.attention_soft_cap)
        for layer in layers
    ]


NAMES_OF_Q_AND_K = re.compile(r"\.(q_proj|k_proj|qkv_proj|q_norm|k_norm)\.")
"""Tensors whose rows are dimensions of the heads of q and k."""


class DecoderAttention:
    def __init__(
        self, config: ModelConfig, layer: int, spec: AttentionSpec, factory: Factory, backend: AttentionBackend
    ):
        self.config, self.rope = config, config.layer(layer).rope
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(factory, config.hidden_size, q_size, kv_size, kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(factory, q_size, config.hidden_size, bias=config.o_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm is not None:
            widths = (q_size, kv_size) if config.qk_norm == "full" else (config.head_dim, config.head_dim)
            self.q_norm, self.k_norm = (RMSNorm(factory, width, config.rms_norm_eps) for width in widths)
        heads = config.num_kv_heads, config.head_dim
        self.sinks = factory.floats(config.num_heads) if config.has_sinks else None
        self.attention = Attention(layer, *heads, spec, backend, self.q_norm, self.k_norm, self.sinks)

    def __call__(
        self,
        norm: RMSNorm | None,
        hidden: Tensor,
        residual: Tensor | None,
        angles: Angles | None,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        qkv, residual = self.qkv_proj.after_norm(norm, hidden, residual)
        return self.o_proj(self.attention(qkv, angles, metadata).flatten(-2)), residual

    def checkpoint_tensors(self, name: str) -> dict[str, Destination]:
        config = self.config
        tensors = self.qkv_proj.parts(name, *config.names.qkv) | self.o_proj.parts(name, "o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            norms = {"q_norm": self.q_norm, "k_norm": self.k_norm}
            tensors |= {f"{name}.{key}.weight": norm.place(config.norm_offset) for key, norm in norms.items()}
        if self.sinks is not None:
            tensors[f"{name}.sinks"] = self.sinks
        if self.rope is None or self.rope.rotary_dim == config.head_dim:
            return tensors
        order = rotary_order(config.head_dim, self.rope.rotary_dim)
        return {
            key: self._reordered(place, order) if NAMES_OF_Q_AND_K.search(key) else place
            for key, place in tensors.items()
        }

    def _reordered(self, place: Destination, order: list[int]) -> Destination:
        """The heads of q and k in another order; those of v, behind them if all are one tensor, stay."""
        heads = self.config.num_heads + self.config.num_kv_heads
        return Reordered(place, order, min(place.shape[0] // self.config.head_dim, heads))


class MLP:
    def __init__(self, config: ModelConfig, factory: Factory):
        self.names, self.activation = config.names, config.activation
        width = config.intermediate_size
        self.gate_up_proj = Linear(factory, config.hidden_size, width, width, bias=config.mlp_bias)
        self.down_proj = Linear(factory, width, config.hidden_size, bias=config.mlp_bias)

    def __call__(self, norm: RMSNorm | None, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        gated, residual = self.gate_up_proj.gated_after_norm(norm, hidden, residual, self.activation)
        return self.down_proj(gated), residual

    def checkpoint_tensors(self, name: str) -> dict[str, Destination]:
        return self.gate_up_proj.parts(f"{name}.mlp", *self.names.gate_up) | self.down_proj.parts(
            f"{name}.mlp", "down_proj"
        )


class SparseMLP:
    def __init__(self, config: ModelConfig, factory: Factory):
        assert config.experts is not None
        self.names, facts = config.names, config.experts
        self.experts = Experts(factory, config.hidden_size, facts, config.activation)

    def __call__(self, norm: RMSNorm | None, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        assert norm is not None
        assert residual is not None
        return self.experts(norm, hidden, residual)

    def checkpoint_tensors(self, name: str) -> dict[str, Destination]:
        return self.experts.parts(f"{name}.{self.names.experts}", self.names.router, self.names.expert_gate_up_down)


class DecoderLayer:
    """Takes and returns (output of the last part, residual before it), as its parts do: the norm before the next adds the two,
    and may be one kernel with the product behind it.
    """

    def __init__(
        self, config: ModelConfig, layer: int, spec: AttentionSpec, factory: Factory, backend: AttentionBackend
    ):
        def norm(name: str | None) -> RMSNorm | None:
            return None if name is None else RMSNorm(factory, config.hidden_size, config.rms_norm_eps)

        self.names, self.residual_scale, self.norm_offset = config.names, config.residual_scale, config.norm_offset
        self.rope = config.layer(layer).rope
        self.before_attention, self.after_attention = (
            norm(self.names.norm_before_attention),
            norm(self.names.norm_after_attention),
        )
        self.before_mlp, self.after_mlp = norm(self.names.norm_before_mlp), norm(self.names.norm_after_mlp)
        self.self_attn = DecoderAttention(config, layer, spec, factory, backend)
        self.mlp: MLP | SparseMLP = (SparseMLP if config.layer(layer).has_experts else MLP)(config, factory)

    def __call__(
        self, hidden: Tensor, residual: Tensor | None, angles: Angles | None, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.self_attn(self.before_attention, hidden, residual, angles, metadata)
        hidden, residual = self.mlp(self.before_mlp, self._added(hidden, self.after_attention), residual)
        return self._added(hidden, self.after_mlp), residual

    def _added(self, hidden: Tensor, norm: RMSNorm | None) -> Tensor:
        """What a part adds to the residual."""
        hidden = hidden if norm is None else norm(hidden)
        return hidden if self.residual_scale == 1.0 else hidden * self.residual_scale

    def checkpoint_tensors(self, name: str) -> dict[str, Destination]:
        norms = (
            (self.names.norm_before_attention, self.before_attention),
            (self.names.norm_after_attention, self.after_attention),
            (self.names.norm_before_mlp, self.before_mlp),
            (self.names.norm_after_mlp, self.after_mlp),
        )
        places: dict[str, Destination] = {
            f"{name}.{called}.weight": norm.place(self.norm_offset) for called, norm in norms if norm is not None
        }
        return places | self.self_attn.checkpoint_tensors(f"{name}.self_attn") | self.mlp.checkpoint_tensors(name)


class Decoder:
    """Token ids to hidden states (`forward`), hidden states to logits (`compute_logits`)."""

    def __init__(self, config: ModelConfig, factory: Factory, backend: AttentionBackend):
        self.config = config
        self.embed_tokens = Embedding(factory, config.vocab_size, config.hidden_size)
        self.embedding_scale = config.embedding_scale
        if config.embedding_scale_is_rounded:
            self.embedding_scale = torch.tensor(config.embedding_scale, dtype=factory.dtype, device="cpu").item()
        specs = attention_specs(config)
        self.layers = [DecoderLayer(config, layer, spec, factory, backend) for layer, spec in enumerate(specs)]
        ropes = dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None)
        self.rotary = {rope: RotaryEmbedding(config.head_dim, rope, factory.device) for rope in ropes}
        self.norm = RMSNorm(factory, config.hidden_size, config.rms_norm_eps)
        self.lm_head = LMHead(factory, self.embed_tokens, tied=config.tie_word_embeddings)
        self.matrices = factory.matrices

    def prepare(self, max_len: int) -> None:
        """Make ready for positions below `max_len`, before the first `forward`."""
        for rotary in self.rotary.values():
            rotary.prepare(max_len)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]) -> Tensor:
        """[num_tokens] ids and positions -> [num_tokens, hidden_size].

        Args:
            metadata: one per layer; layers of one KV group have the same.
        """
        hidden = self.embed_tokens(input_ids)
        if self.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        residual: Tensor | None = None
        angles: dict[RopeConfig | None, Angles | None] = {
            rope: rotary(positions) for rope, rotary in self.rotary.items()
        }
        angles[None] = None
        for layer, seen in zip(self.layers, metadata, strict=True):
            hidden, residual = layer(hidden, residual, angles[layer.rope], seen)
        assert residual is not None
        return self.norm.add_and_norm(hidden, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] in float32; call it with the rows that are sampled only."""
        logits, cap = self.lm_head(hidden), self.config.logits_soft_cap
        if self.config.logits_divisor != 1.0:
            logits.div_(self.config.logits_divisor)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def checkpoint_tensors(self) -> dict[str, Destination]:
        """Name of every tensor of a checkpoint -> where it is copied to."""
        tensors: dict[str, Destination] = {
            EMBEDDING: self.embed_tokens.rows(),
            "model.norm.weight": self.norm.place(self.config.norm_offset),
        }
        if not self.config.tie_word_embeddings:
            tensors[HEAD] = self.lm_head.rows()
        for i, layer in enumerate(self.layers):
            tensors |= layer.checkpoint_tensors(f"model.layers.{i}")
        return tensors
