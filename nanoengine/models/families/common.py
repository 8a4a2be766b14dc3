"""Fields of config.json that are common to all families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanoengine.core.config import DTYPES
from nanoengine.errors import UnsupportedModel, shown
from nanoengine.models.config_fields import MAX_LAYERS, MAX_POSITIONS, ConfigFields
from nanoengine.models.model_config import LayerConfig, ModelConfig
from nanoengine.models.rope_config import read_rope

MAX_HEAD_DIM = 2**16
MAX_EXPERTS = 2**16
"""Limit of the experts of all layers: each has its tensors."""


def read_decoder(
    fields: ConfigFields,
    *,
    head_dim: int | None = None,
    eps: float = 1e-6,
    theta: float = 10_000.0,
    tied: bool = False,
    windows: Sequence[int | None] = (None,),
    may_be_partial: bool = False,
    layers: tuple[LayerConfig, ...] | None = None,
    **facts: Any,
) -> ModelConfig:
    """The config of a decoder.

    Args:
        fields: of its config.json.
        head_dim, eps, theta, tied: defaults; without a head_dim, it is the hidden size divided by the number of heads.
        windows: of each layer in tokens; they repeat.
        may_be_partial: whether a part of each head may be rotated.
        layers: replaces layers that differ by their windows only, which all have experts if there are any.
        facts: other fields of the `ModelConfig`, where the family differs from Llama.

    Raises:
        UnsupportedModel: a field that is missing, wrong, or not computed.
    """
    if "activation" not in facts:
        fields.expect("hidden_act", "silu")
    facts = {"intermediate_size": fields.integer("intermediate_size")} | facts
    size = head_dim_of(fields, head_dim)
    if layers is None:
        rope = read_rope(fields, size, theta, may_be_partial=may_be_partial)
        layers = tuple(LayerConfig(rope=rope, window=window, has_experts="experts" in facts) for window in windows)
    if not any(layer.mixer for layer in layers):
        facts.pop("states", None)
    if len(set(layers)) == 1:
        layers = layers[:1]
    config = ModelConfig(
        architecture="",  # set by `read_model_config`
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=fields.integer("num_hidden_layers", most=MAX_LAYERS),
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=fields.integer("num_key_value_heads", fields.integer("num_attention_heads")),
        head_dim=size,
        max_position_embeddings=fields.integer("max_position_embeddings", most=MAX_POSITIONS),
        rms_norm_eps=fields.number("rms_norm_eps", eps),
        tie_word_embeddings=fields.flag("tie_word_embeddings", tied),
        dtype=_dtype(fields),
        layers=layers,
        **facts,
    )
    if config.experts is not None and config.num_layers * config.experts.num_experts > MAX_EXPERTS:
        count = f"{config.num_layers} layers of {config.experts.num_experts} experts"
        raise UnsupportedModel(f"{count} in {fields.where}: there must be at most {MAX_EXPERTS} experts")
    if config.num_heads % config.num_kv_heads:
        why = f"it must be a multiple of num_key_value_heads ({config.num_kv_heads})"
        raise fields.wrong("num_attention_heads", config.num_heads, why)
    return config


def biases_of(fields: ConfigFields, default: bool = False) -> dict[str, Any]:
    """Biases of all projections of attention, or of none."""
    bias = fields.flag("attention_bias", default)
    return {"qkv_bias": bias, "o_bias": bias}


def head_dim_of(fields: ConfigFields, default: int | None = None, key: str = "head_dim") -> int:
    """Dimensions of a head: stated, the default, or the hidden size divided by the number of heads."""
    if default is None:
        default = max(fields.integer("hidden_size") // fields.integer("num_attention_heads"), 1)
    size = fields.integer(key, default, MAX_HEAD_DIM)
    if size % 2:
        raise fields.wrong(key, size, "rotary embeddings need an even one")
    return size


def rotated_layers(fields: ConfigFields, count: int) -> list[int]:
    """Whether each layer rotates heads (1) or not (0): `no_rope_layers`, or all except every n-th."""
    interval = fields.integer("no_rope_layer_interval", 4)
    rotates = fields.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(count)]
    if not isinstance(rotates, list) or len(rotates) < count or not all(value in (0, 1) for value in rotates):
        raise fields.wrong("no_rope_layers", rotates, f"it must be a list of {count} of 0 (no rotation) and 1")
    return rotates


def _dtype(fields: ConfigFields) -> str:
    fields.ignore("torch_dtype")
    stated = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    dtype = stated.removeprefix("torch.") if isinstance(stated, str) else None
    if dtype not in DTYPES:
        raise UnsupportedModel(f"the checkpoint's dtype is {shown(stated)}: supported are {', '.join(DTYPES)}")
    return dtype
