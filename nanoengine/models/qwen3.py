"""Qwen3 (dense): grouped-query attention with q/k norms and rotary embeddings, SwiGLU, RMSNorm.

Follows the published architecture (Qwen3 technical report, 2025) and the tensor names of Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import Tensor, nn

from nanoengine.attention.backend import AttentionBackend, AttentionMetadata
from nanoengine.config import ModelConfig
from nanoengine.layers.activation import silu_and_mul
from nanoengine.layers.attention import Attention
from nanoengine.layers.embedding import Embedding, LMHead
from nanoengine.layers.linear import Linear
from nanoengine.layers.norm import RMSNorm
from nanoengine.layers.rotary import apply_rotary, rotary_angles

Angles = tuple[Tensor, Tensor]


class Qwen3Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, backend: AttentionBackend):
        super().__init__()
        self.head_dim = config.head_dim
        self.q_size = config.num_heads * config.head_dim
        self.kv_size = config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self.qkv_proj = Linear(config.hidden_size, self.q_size, self.kv_size, self.kv_size, bias=bias)
        self.o_proj = Linear(self.q_size, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.attention = Attention(layer, config.head_dim**-0.5, backend)

    def forward(self, hidden: Tensor, angles: Angles, metadata: AttentionMetadata) -> Tensor:
        q, k, v = self.qkv_proj(hidden).split((self.q_size, self.kv_size, self.kv_size), dim=-1)
        q = apply_rotary(self.q_norm(q.unflatten(-1, (-1, self.head_dim))), angles)  # [num_tokens, num_heads, head_dim]
        k = apply_rotary(self.k_norm(k.unflatten(-1, (-1, self.head_dim))), angles)
        v = v.unflatten(-1, (-1, self.head_dim))
        return self.o_proj(self.attention(q, k, v, metadata).flatten(-2))


class Qwen3MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, config.intermediate_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))


class Qwen3Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, backend: AttentionBackend):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen3Attention(config, layer, backend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def forward(self, hidden: Tensor, angles: Angles, metadata: AttentionMetadata) -> Tensor:
        residual = hidden
        hidden = self.self_attn(self.input_layernorm(hidden), angles, metadata)
        hidden, residual = self.post_attention_layernorm.add_and_norm(hidden, residual)
        return residual + self.mlp(hidden)

    def checkpoint_tensors(self, name: str) -> dict[str, Tensor]:
        attention, mlp = self.self_attn, self.mlp
        return {
            f"{name}.input_layernorm.weight": self.input_layernorm.weight,
            f"{name}.post_attention_layernorm.weight": self.post_attention_layernorm.weight,
            f"{name}.self_attn.q_norm.weight": attention.q_norm.weight,
            f"{name}.self_attn.k_norm.weight": attention.k_norm.weight,
            **attention.qkv_proj.parts(f"{name}.self_attn", "q_proj", "k_proj", "v_proj"),
            **attention.o_proj.parts(f"{name}.self_attn", "o_proj"),
            **mlp.gate_up_proj.parts(f"{name}.mlp", "gate_proj", "up_proj"),
            **mlp.down_proj.parts(f"{name}.mlp", "down_proj"),
        }


class Qwen3ForCausalLM(nn.Module):
    """Token ids to hidden states (`forward`), hidden states to logits (`compute_logits`)."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend):
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Qwen3Layer(config, layer, backend) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = LMHead(self.embed_tokens, tied=config.tie_word_embeddings)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """[num_tokens] ids and positions -> [num_tokens, hidden_size]."""
        hidden = self.embed_tokens(input_ids)
        angles = rotary_angles(positions, self.config.head_dim, self.config.rope_theta)
        for layer in self.layers:
            hidden = layer(hidden, angles, metadata)
        return self.norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] in float32; call it with the rows that are sampled only."""
        return self.lm_head(hidden).float()

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Name of every tensor of a checkpoint -> the (part of a) parameter that it is copied into."""
        tensors: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embed_tokens.weight,
            "model.norm.weight": self.norm.weight,
        }
        if not self.config.tie_word_embeddings:
            tensors["lm_head.weight"] = self.lm_head.weight
        for i, layer in enumerate(cast(Iterable[Qwen3Layer], self.layers)):
            tensors |= layer.checkpoint_tensors(f"model.layers.{i}")
        return tensors
