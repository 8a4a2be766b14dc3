"""Qwen3 (dense): grouped-query attention with q/k norms and rotary embeddings, SwiGLU, RMSNorm.

Follows the published architecture (Qwen3 technical report, 2025) and the tensor names of Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import Tensor

from nanoengine.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec
from nanoengine.config import ModelConfig
from nanoengine.kernels.interface import Destination
from nanoengine.layers.attention import Attention
from nanoengine.layers.embedding import Embedding, LMHead
from nanoengine.layers.factory import Factory
from nanoengine.layers.linear import Linear
from nanoengine.layers.norm import RMSNorm
from nanoengine.layers.rotary import Angles, RotaryEmbedding


class Qwen3Attention:
    def __init__(
        self, config: ModelConfig, layer: int, spec: AttentionSpec, factory: Factory, backend: AttentionBackend
    ):
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self.qkv_proj = Linear(factory, config.hidden_size, q_size, kv_size, kv_size, bias=bias)
        self.o_proj = Linear(factory, q_size, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(factory, config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(factory, config.head_dim, config.rms_norm_eps)
        heads = config.num_kv_heads, config.head_dim
        self.attention = Attention(layer, *heads, spec, backend, self.q_norm, self.k_norm)

    def __call__(
        self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None, angles: Angles, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        qkv, residual = self.qkv_proj.after_norm(norm, hidden, residual)
        return self.o_proj(self.attention(qkv, angles, metadata).flatten(-2)), residual


class Qwen3MLP:
    def __init__(self, config: ModelConfig, factory: Factory):
        self.gate_up_proj = Linear(factory, config.hidden_size, config.intermediate_size, config.intermediate_size)
        self.down_proj = Linear(factory, config.intermediate_size, config.hidden_size)

    def __call__(self, norm: RMSNorm, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        gated, residual = self.gate_up_proj.gated_after_norm(norm, hidden, residual)
        return self.down_proj(gated), residual


class Qwen3Layer:
    """Takes and returns (output of the last part, residual before it), as its parts do: the norm before the next adds the two,
    and may be one kernel with the product behind it.
    """

    def __init__(
        self, config: ModelConfig, layer: int, spec: AttentionSpec, factory: Factory, backend: AttentionBackend
    ):
        self.input_layernorm = RMSNorm(factory, config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen3Attention(config, layer, spec, factory, backend)
        self.post_attention_layernorm = RMSNorm(factory, config.hidden_size, config.rms_norm_eps)
        self.mlp = Qwen3MLP(config, factory)

    def __call__(
        self, hidden: Tensor, residual: Tensor | None, angles: Angles, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.self_attn(self.input_layernorm, hidden, residual, angles, metadata)
        return self.mlp(self.post_attention_layernorm, hidden, residual)

    def checkpoint_tensors(self, name: str) -> dict[str, Destination]:
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


class Qwen3ForCausalLM:
    """Token ids to hidden states (`forward`), hidden states to logits (`compute_logits`)."""

    def __init__(self, config: ModelConfig, factory: Factory, backend: AttentionBackend):
        self.config = config
        self.embed_tokens = Embedding(factory, config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta, factory.device)
        specs = self.attention_specs(config)
        self.layers = [Qwen3Layer(config, layer, spec, factory, backend) for layer, spec in enumerate(specs)]
        self.norm = RMSNorm(factory, config.hidden_size, config.rms_norm_eps)
        self.lm_head = LMHead(factory, self.embed_tokens, tied=config.tie_word_embeddings)

    @staticmethod
    def attention_specs(config: ModelConfig) -> list[AttentionSpec]:
        """What each layer asks of attention."""
        return [AttentionSpec(scale=config.head_dim**-0.5)] * config.num_layers

    def prepare(self, max_len: int) -> None:
        """Make ready for positions below `max_len`, before the first `forward`."""
        self.rotary.prepare(max_len)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """[num_tokens] ids and positions -> [num_tokens, hidden_size]."""
        hidden = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        angles = self.rotary(positions)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, angles, metadata)
        assert residual is not None
        return self.norm.add_and_norm(hidden, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] in float32; call it with the rows that are sampled only."""
        return self.lm_head(hidden)

    def checkpoint_tensors(self) -> dict[str, Destination]:
        """Name of every tensor of a checkpoint -> where it is copied to."""
        tensors: dict[str, Destination] = {
            "model.embed_tokens.weight": self.embed_tokens.rows(),
            "model.norm.weight": self.norm.weight,
        }
        if not self.config.tie_word_embeddings:
            tensors["lm_head.weight"] = self.lm_head.rows()
        for i, layer in enumerate(self.layers):
            tensors |= layer.checkpoint_tensors(f"model.layers.{i}")
        return tensors
