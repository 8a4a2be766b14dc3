"""What the config.json files of all families say in the same words."""

from __future__ import annotations

from typing import Any

from nanoengine.config import DTYPES, MAX_LAYERS, MAX_PARAMETERS, MAX_POSITIONS
from nanoengine.errors import UnsupportedModel, shown
from nanoengine.model_config import LayerConfig, ModelConfig
from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.rope_config import LAYER_TYPES, read_rope

MAX_HEAD_DIM = 2**16
MAX_EXPERTS = 2**16
"""Of all layers together: each has tensors of its own."""


def read_decoder(
    fields: ConfigFields,
    architecture: str,
    *,
    head_dim: int | None = None,
    eps: float = 1e-6,
    theta: float = 10_000.0,
    tied: bool = False,
    window: int | None = None,
    may_be_partial: bool = False,
    layers: tuple[LayerConfig, ...] | None = None,
    **facts: Any,
) -> ModelConfig:
    """The config of a decoder.

    Args:
        fields: of its config.json.
        architecture: the name of it.
        head_dim, eps, theta, tied: what holds where the file says nothing; without a head_dim, heads share the hidden size.
        window: tokens that each layer sees.
        may_be_partial: whether a part of each head may be rotated alone.
        layers: in place of layers that are all the same.
        facts: other fields of `ModelConfig`, in which the family differs from Llama.

    Raises:
        UnsupportedModel: a field that is missing, wrong, or not computed.
    """
    fields.expect("hidden_act", "silu")
    if (quantization := fields.get("quantization_config")) is not None:
        raise UnsupportedModel(
            f"quantization_config is {shown(quantization)}: quantized safetensors are not read; give a checkpoint in bfloat16, "
            "float16 or float32, or a GGUF file"
        )
    size = head_dim_of(fields, head_dim)
    if layers is None:
        layers = (LayerConfig(rope=read_rope(fields, size, theta, may_be_partial=may_be_partial), window=window),)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
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
        raise UnsupportedModel(
            f"{config.num_layers} layers of {config.experts.num_experts} experts in {fields.where}: there must be at most "
            f"{MAX_EXPERTS} experts"
        )
    if config.num_heads % config.num_kv_heads:
        raise UnsupportedModel(
            f"num_attention_heads is {config.num_heads}: it must be a multiple of num_key_value_heads ({config.num_kv_heads})"
        )
    if (total := config.num_parameters()) > MAX_PARAMETERS:
        raise UnsupportedModel(
            f"the sizes in {fields.where} make {total} weights: they must be at most {MAX_PARAMETERS}"
        )
    return config


def head_dim_of(fields: ConfigFields, default: int | None = None) -> int:
    """Dimensions of a head, as stated, or the family's default, or a share of the hidden size."""
    if default is None:
        default = max(fields.integer("hidden_size") // fields.integer("num_attention_heads"), 1)
    size = fields.integer("head_dim", default, MAX_HEAD_DIM)
    if size % 2:
        raise UnsupportedModel(f"head_dim is {size}: rotary embeddings need an even one")
    return size


def window_of(fields: ConfigFields, default: int | None = None) -> int | None:
    """Tokens that a layer sees; `default` if the file does not mention it, none if it says null."""
    if "sliding_window" not in fields:
        return default
    return fields.integer("sliding_window") if fields.get("sliding_window") is not None else None


def layer_types_of(fields: ConfigFields) -> list[str] | None:
    """What the file says of each layer: one of `LAYER_TYPES`; None if nothing."""
    types, count = fields.get("layer_types"), fields.integer("num_hidden_layers", most=MAX_LAYERS)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != count or not all(kind in LAYER_TYPES for kind in types):
        raise UnsupportedModel(
            f"layer_types is {shown(types)}: it must be a list of {count} of {', '.join(LAYER_TYPES)}"
        )
    return types


def _dtype(fields: ConfigFields) -> str:
    stated = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    fields.get("torch_dtype")
    dtype = stated.removeprefix("torch.") if isinstance(stated, str) else None
    if dtype not in DTYPES:
        raise UnsupportedModel(f"the checkpoint's dtype is {shown(stated)}: supported are {', '.join(DTYPES)}")
    return dtype
