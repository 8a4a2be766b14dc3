"""ModelConfig: the description of a decoder, independent of family and file format. Plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from nanoengine.core.model_config import DenseConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """A rotary embedding (`models/layers/rotary.py` computes each kind)."""

    theta: float
    rotary_dim: int  # leading dimensions of a head that are rotated; the others stay as they are
    num_pairs: int | None = None  # pairs of these with an angle; None: all. The others have frequency 0
    interleaved: bool = False  # the partner of dimension 2i is 2i + 1, and not i + rotary_dim / 2
    kind: str = "default"
    factor: float = 1.0  # of the trained length
    trained_positions: int = 0  # the trained length, before scaling
    amplitude: float = 1.0  # factor of cosines and sines
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    long_factors: tuple[float, ...] = ()  # longrope: divisors of each frequency, beyond and within the trained length
    short_factors: tuple[float, ...] = ()
    query_growth: float = 0.0  # a query is multiplied by 1 + growth * log(1 + position // trained_positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """The facts in which layers of a model may differ."""

    rope: RopeConfig | None  # None: no rotation
    window: int | None = None  # visible tokens of a query, itself included; None: all
    has_experts: bool = False
    attends: bool = True
    mixer: str | None = None  # instead of attention or parallel: "short_conv", "delta_net" or "mamba2"
    has_mlp: bool = True  # or experts
    head_dim: int | None = None  # None, here and below: that of the model
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    v_is_k: bool = False  # V is the output of k_proj, before its norm and RoPE
    kv_layer: int | None = None  # the earlier layer whose K/V it reads; None: it has K/V


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """Sizes of the layers with states, equal in all: a convolution of `channels`, and a state [depth, width] for each head."""

    taps: int  # of the convolution: tokens, the current one included
    channels: int
    num_heads: int = 0
    num_groups: int = 0  # of heads with the same queries and keys
    depth: int = 0
    width: int = 0
    conv_bias: bool = False
    proj_bias: bool = False
    packed: tuple[str, ...] = ()  # projections that are one tensor in a checkpoint, as in Qwen3-Next: "qkvz", "ba"
    has_norm: bool = True  # Mamba 2: before its gate, or behind it
    gate_first: bool = True
    is_tiled: bool = False  # head i belongs to group i % num_groups (GGUF), and not to i // heads_per_group

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the states of a layer: stored inputs of the convolution, and the recurrence of each head."""
        return (self.taps - 1, self.channels), (self.num_heads, self.depth, self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts instead of an MLP."""

    num_experts: int
    num_chosen: int  # for each token
    intermediate_size: int  # of each expert
    normalize: bool  # whether the factors of the chosen ones add up to 1
    scores: str = "softmax"  # of the router's logits; or "sigmoid", of each by itself
    # In a checkpoint, of a bias that is added to the scores where experts are chosen, and to no factor; (): there is none.
    bias_shape: tuple[int, ...] = ()
    num_groups: int = 1  # of adjacent experts; the best groups are eligible, by the sum of the two best scores of each
    groups_chosen: int = 1
    added_to_sum: float = 0.0  # by which factors are divided, and the least that it may be
    least_sum: float = 0.0
    scale: float = 1.0  # of the factors
    has_biases: bool = False  # of the router and of each expert's products
    are_stacked: bool = False  # in a checkpoint, one tensor has all of them, gates before ups
    are_transposed: bool = False  # and inputs before outputs
    scales_inputs: bool = False  # the sigmoid of a logit multiplies the input of its expert, not the output
    shared_size: int = 0  # of an MLP that every token goes through beside them
    latent_size: int = 0  # to which tokens are projected before the experts, and back behind them
    shared_is_gated: bool = False  # by a number between 0 and 1
    beside_mlp: bool = False  # the layer has an MLP, too, and each of the two its norms
    is_mxfp4: bool = False  # the format of the experts in quantized folders of this family


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of the parts of a layer in a checkpoint; several names are parts of one weight, one name is a fused tensor."""

    norm_before_attention: str | None = "input_layernorm"
    norm_after_attention: str | None = None
    norm_before_mlp: str | None = "post_attention_layernorm"
    norm_after_mlp: str | None = None
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    experts: str = "mlp"
    router: str = "gate"
    # Of each expert; with two names, one tensor has gates and ups interleaved, the other the down projections.
    expert_gate_up_down: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    # Replaced parts of names; the others are as in Llama, Qwen3 and Qwen2-MoE.
    replaced: tuple[tuple[str, str], ...] = ()


class WeightFactor(NamedTuple):
    """A factor that is multiplied into a weight of each layer at load."""

    name: str  # suffix of its names in a checkpoint
    factors: tuple[float, ...]
    rows: tuple[int, ...] = ()  # how many rows each factor multiplies; empty: the one factor multiplies all


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(DenseConfig):
    """The description of a decoder. Defaults are those of Llama: no biases, no QK norms, norms before each part."""

    layers: tuple[LayerConfig, ...]  # of the first layers; they repeat
    positions_are_scaled: bool = False  # max_position_embeddings already has the factor of the rotation
    experts: ExpertsConfig | None = None
    states: StateConfig | None = None  # of layers that have no attention
    has_output_gate: bool = False  # q_proj also computes a gate of the output of attention
    mlp_bias: bool = False
    activation: str = "silu"  # of MLPs and experts: one of `kernels/reference/gates.py`, or "relu2": there is no gate
    norm_offset: float = 0.0  # added to every norm weight when it is loaded (Gemma stores w - 1)
    has_sinks: bool = False  # an additional logit in the softmax of each head
    # "head": over each head of q and k; "late": the same after RoPE; "full": over all heads; "plain": over each rotated head,
    # without weights
    qk_norm: str | None = None
    has_v_norm: bool = False  # over each head of V, without weights
    has_layer_scale: bool = False  # a factor of the output of a layer
    per_layer_size: int = 0  # size of the embedding of each token for each layer; 0: none
    has_chunks: bool = False  # windows are chunks: they begin at multiples of their size
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    # Without rotation, a query is multiplied by 1 + growth * log(1 + (position + 1) // period).
    query_growth: float = 0.0
    query_period: int = 1
    embedding_scale: float = 1.0
    embedding_scale_is_rounded: bool = False  # to the dtype of the model, before it multiplies
    residual_scale: float = 1.0  # of the output of each part
    logits_divisor: float = 1.0
    attention_soft_cap: float | None = None  # of scores and of logits: cap * tanh(x / cap)
    logits_soft_cap: float | None = None
    names: TensorNames = TensorNames()
    factors: tuple[WeightFactor, ...] = ()
    linears: tuple[tuple[str, int, int], ...] = ()  # of a model without a family: name, outputs, inputs, for adapters

    def layer(self, number: int) -> LayerConfig:
        return self.layers[number % len(self.layers)]

    @property
    def longest(self) -> int:
        """The limit of `max_model_len`: dynamic rotations extend the trained length."""
        stretches = [layer.rope.factor for layer in self.layers if layer.rope and layer.rope.kind == "dynamic"]
        return int(self.max_position_embeddings * max(stretches, default=1.0))

    def angles_of(self, max_len: int) -> tuple[int, ...]:
        """A key of the angles beside the model, if `max_len` is the limit of sequences."""
        ropes = [layer.rope for layer in self.layers if layer.rope is not None]
        lengths = {max(max_len, rope.trained_positions) for rope in ropes if rope.kind == "dynamic"}
        are_long = {int(max_len > rope.trained_positions) for rope in ropes if rope.kind == "longrope"}
        return *sorted(lengths), *sorted(are_long)

    def within(self, max_len: int) -> ModelConfig:
        """The model for sequences of at most `max_len` tokens: windows of at least that size are dropped."""
        layers = (replace(layer, window=None) if (layer.window or 0) >= max_len else layer for layer in self.layers)
        return replace(self, layers=tuple(layers))

    @property
    def attention_layers(self) -> list[int]:
        """Layers with K/V in the cache; the others have no attention, or read the K/V of an earlier layer."""
        layers = enumerate(map(self.layer, range(self.num_layers)))
        return [number for number, layer in layers if layer.attends and layer.kv_layer is None]

    @property
    def head_dims(self) -> list[int]:
        """The distinct head sizes of all layers."""
        return sorted({layer.head_dim or self.head_dim for layer in self.layers})

    @property
    def num_state_layers(self) -> int:
        return sum(self.layer(number).mixer is not None for number in range(self.num_layers))

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of K and V of one token in all layers, each as large as the largest."""
        return len(self.attention_layers) * 2 * self.num_kv_heads * self.head_dim * dtype_bytes
