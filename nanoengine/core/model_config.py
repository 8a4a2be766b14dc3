"""ModelConfig: the facts of a dense decoder, read from the config.json of a model folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoengine.core.errors import ModelNotFound, UnsupportedModel, shown

ARCHITECTURE = "Qwen3ForCausalLM"
DTYPES = ("float32", "bfloat16", "float16")
MAX_INT32 = 2**31 - 1
MAX_JSON_BYTES = 64 << 20  # the indexes of the largest models have a fifth of it


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON table in a file of a model folder.

    Raises:
        ModelNotFound: the file is missing or cannot be read.
        UnsupportedModel: it holds no JSON table, or one too large or too deep.
    """
    path = folder / name
    if not path.is_file():
        raise ModelNotFound(
            f"{path} is missing: a model is a folder with config.json, *.safetensors and tokenizer files, or a .gguf file"
        )
    try:
        table = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size <= MAX_JSON_BYTES else None
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise UnsupportedModel(f"{path} must hold a JSON table of at most {MAX_JSON_BYTES} bytes")
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of a decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: str
    qkv_bias: bool = False
    o_bias: bool = False

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """K and V of one token in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(ModelConfig):
    """Qwen3: norms over each head of q and k, and one base of all rotations."""

    rope_theta: float


class ConfigFields:
    """A JSON table, read field by field. Every method raises UnsupportedModel for a value that is missing or wrong."""

    def __init__(self, table: Mapping[str, Any], where: str = "the model's config.json"):
        self.table, self.where = table, where

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands there; `default` if there is none, or null."""
        value = self.table.get(key)
        return default if value is None else value

    def integer(self, key: str, default: Any = None, most: int = MAX_INT32) -> int:
        """A positive integer."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, value, "a positive integer")
        if value > most:
            raise self.wrong(key, value, f"at most {most}")
        return value

    def number(self, key: str, default: Any = None) -> float:
        """A positive number; a field that is there as null is wrong."""
        value = self.table.get(key, self.get(key, default))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if value not in (False, True):
            raise self.wrong(key, value, "true or false")
        return bool(value)

    def expect(self, key: str, *supported: object) -> None:
        """A field whose other values are not computed; it may be missing."""
        value = self.get(key)
        if value is not None and value not in supported:
            raise UnsupportedModel(f"{key} is {shown(value)}: only {' or '.join(map(repr, supported))} is supported")

    def table_of(self, key: str) -> Mapping[str, Any]:
        """A table; an empty one if there is none."""
        value = self.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "a table")
        return value

    def wrong(self, key: str, value: object, right: str) -> UnsupportedModel:
        return UnsupportedModel(f"{key} is {shown(value)} in {self.where}: it must be {right}")


def read_config(folder: Path) -> Qwen3Config:
    """The config of a Qwen3 model, from its config.json (schemas of transformers 4 and 5).

    Raises:
        ModelNotFound: the file is missing.
        UnsupportedModel: another architecture, a feature that is not computed, or a field that is missing or wrong.
    """
    fields = ConfigFields(read_json(folder, "config.json"))
    if (stated := fields.get("architectures")) != [ARCHITECTURE]:
        raise fields.wrong("architectures", stated, repr([ARCHITECTURE]))
    fields.expect("hidden_act", "silu")
    fields.expect("use_sliding_window", False)
    fields.expect("quantization_config", None)
    fields.expect("rope_scaling", None)
    rope = ConfigFields(fields.table_of("rope_parameters"), "rope_parameters of the model's config.json")
    rope.expect("rope_type", "default")
    theta, bias = rope.number("rope_theta", fields.get("rope_theta", 10_000.0)), fields.flag("attention_bias")
    return Qwen3Config(architecture=ARCHITECTURE, rope_theta=theta, qkv_bias=bias, o_bias=bias, **read_sizes(fields))


def read_sizes(fields: ConfigFields) -> dict[str, Any]:
    """The fields of `ModelConfig` that the config.json files of all decoders spell alike."""
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_attention_heads", num_heads, f"a multiple of num_key_value_heads ({num_kv_heads})")
    head_dim = fields.integer("head_dim", 128)
    if head_dim % 2:
        raise fields.wrong("head_dim", head_dim, "even, since its dimensions are rotated in pairs")
    dtype = str(fields.get("dtype", fields.get("torch_dtype", "float32"))).removeprefix("torch.")
    if dtype not in DTYPES:
        raise fields.wrong("dtype", dtype, " or ".join(DTYPES))
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
    return {name: fields.integer(name) for name in sizes} | {
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "dtype": dtype,
    }
