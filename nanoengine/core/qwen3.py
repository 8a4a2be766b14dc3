"""Qwen3 (Qwen team, 2025): grouped-query attention with norms of q and k, SwiGLU, and a norm before each part.

Parts take and return (output of the last part, residual before it): the norm before the next part adds the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.core.attention import AttentionMetadata, AttentionSpec, CoreAttentionBackend
from nanoengine.core.kernels import CoreKernels, WeightSlot
from nanoengine.core.layers import Angles, Linear, PagedAttention, RMSNorm, RotaryTable, WeightFactory
from nanoengine.core.model_config import DenseConfig, Qwen3Config
from nanoengine.core.weights import EMBEDDING, HEAD


def build_qwen3(
    config: Qwen3Config, kernels: CoreKernels, backend: CoreAttentionBackend, dtype: torch.dtype, device: torch.device
) -> DenseDecoder:
    """The model with unset weights, on its device and in its dtype from the start."""
    factory = WeightFactory(kernels, dtype, device)
    spec = AttentionSpec(scale=config.head_dim**-0.5)
    rotary = RotaryTable(config.head_dim, config.rope_theta, device)

    def norm(size: int) -> RMSNorm:
        return RMSNorm(factory, size, config.rms_norm_eps)

    def layer(number: int) -> DenseLayer:
        norms = norm(config.head_dim), norm(config.head_dim)
        attention = DenseAttention(config, factory, PagedAttention(number, config, spec, backend, *norms))
        return DenseLayer(
            norm(config.hidden_size), attention, norm(config.hidden_size), DenseMLP(config, factory), rotary
        )

    layers = [layer(number) for number in range(config.num_layers)]
    return DenseDecoder(config, factory, layers, norm(config.hidden_size))


class DenseAttention:
    """Attention, and the projections before and behind it."""

    qkv_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: DenseConfig, factory: WeightFactory, attention: PagedAttention):
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(factory, config.hidden_size, q_size, kv_size, kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(factory, q_size, config.hidden_size, bias=config.o_bias)
        self.attention, self.norms = attention, attention.norms

    def __call__(
        self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None, angles: Angles | None, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        x, residual = norm.add_and_norm(hidden, residual)
        return self.o_proj(self.attention(self.qkv_proj(x), angles, metadata).flatten(-2)), residual

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots = self.qkv_proj.slots(prefix, *self.qkv_names) | self.o_proj.slots(prefix, "o_proj")
        norms = zip(("q_norm", "k_norm"), self.norms, strict=False)
        return slots | {f"{prefix}.{name}.weight": norm.slot() for name, norm in norms}


class DenseMLP:
    """Gated MLP: SwiGLU."""

    gate_up_names: tuple[str, ...] = ("gate_proj", "up_proj")

    def __init__(self, config: DenseConfig, factory: WeightFactory, *, bias: bool = False):
        width = config.intermediate_size
        self.gate_up_proj = Linear(factory, config.hidden_size, width, width, bias=bias)
        self.down_proj = Linear(factory, width, config.hidden_size, bias=bias)

    def __call__(self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x, residual = norm.add_and_norm(hidden, residual)
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up), residual

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        prefix = f"{prefix}.mlp"
        return self.gate_up_proj.slots(prefix, *self.gate_up_names) | self.down_proj.slots(prefix, "down_proj")


class DenseLayer:
    """One decoder layer. `rotary`: its RoPE; None: no RoPE."""

    def __init__(
        self,
        attn_norm: RMSNorm,
        self_attn: DenseAttention,
        mlp_norm: RMSNorm,
        mlp: DenseMLP,
        rotary: RotaryTable | None,
    ):
        self.attn_norm, self.self_attn, self.rotary = attn_norm, self_attn, rotary
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def __call__(
        self, hidden: Tensor, residual: Tensor | None, angles: Angles | None, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.self_attn(self.attn_norm, hidden, residual, angles, metadata)
        return self.mlp(self.mlp_norm, hidden, residual)

    def norms(self) -> dict[str, RMSNorm]:
        return {"input_layernorm": self.attn_norm, "post_attention_layernorm": self.mlp_norm}

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        norms = {f"{prefix}.{name}.weight": norm.slot() for name, norm in self.norms().items()}
        return norms | self.self_attn.slots(f"{prefix}.self_attn") | self.mlp.slots(prefix)


class DenseDecoder:
    """Token ids to hidden states (`forward`), hidden states to logits (`compute_logits`)."""

    def __init__(self, config: DenseConfig, factory: WeightFactory, layers: Sequence[DenseLayer], norm: RMSNorm):
        self.config, self.layers, self.norm = config, layers, norm
        self.rotaries = list(dict.fromkeys(layer.rotary for layer in layers if layer.rotary is not None))
        self.kernels = factory.kernels
        self.embed_tokens = self.lm_head = factory.weight(config.hidden_size, config.vocab_size)
        if not config.tie_word_embeddings:
            self.lm_head = factory.weight(config.hidden_size, config.vocab_size)

    def prepare(self, max_len: int) -> None:
        """Make ready for positions below `max_len`, before the first `forward`."""
        for rotary in self.rotaries:
            rotary.prepare(max_len)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.kernels.embed(input_ids, self.embed_tokens)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]) -> Tensor:
        """[num_tokens] ids and positions, and the metadata of each layer -> [num_tokens, hidden_size]."""
        hidden, residual = self.embed(input_ids), None
        angles: dict[RotaryTable | None, Angles] = {rotary: rotary(positions) for rotary in self.rotaries}
        for layer, layer_metadata in zip(self.layers, metadata, strict=True):
            hidden, residual = layer(hidden, residual, angles.get(layer.rotary), layer_metadata)
        assert residual is not None
        return self.norm.add_and_norm(hidden, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] in float32; call it with the rows that are sampled only."""
        return self.kernels.logits(hidden, self.lm_head)

    def checkpoint_tensors(self) -> dict[str, WeightSlot]:
        """Name of every tensor of a checkpoint -> its slot."""
        count = self.config.vocab_size
        heads = {} if self.config.tie_word_embeddings else {HEAD: self.lm_head.rows(0, count)}
        slots = {EMBEDDING: self.embed_tokens.rows(0, count), "model.norm.weight": self.norm.slot(), **heads}
        for number, layer in enumerate(self.layers):
            slots |= layer.slots(f"model.layers.{number}")
        return slots
