"""ModelConfig: the facts of a dense decoder, read from the config.json of a model folder."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoengine.core.config import DTYPES
from nanoengine.core.errors import ModelNotFound, UnsupportedModel, shown
from nanoengine.core.options import MAX_INT32

MAX_JSON_BYTES = 64 << 20  # the indexes of the largest models have a fifth of it

SUPPORTED: dict[str, Any] = {
    "architectures": (["Qwen3ForCausalLM"],),
    "hidden_act": (None, "silu"),
    "use_sliding_window": (None, False),
    "rope_scaling": (None,),
    "rope_type": (None, "default"),
    "quantization_config": (None,),
    "dtype": DTYPES,
}
"""Values of fields whose other values are not computed; None: the field may be missing."""


def read_file(path: Path, most: int) -> bytes:
    """The bytes of a file that may be hostile. Raises OSError if it has more than `most` bytes, or is a pipe or a device."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG((facts := os.fstat(file.fileno())).st_mode) or facts.st_size > most:
            raise OSError(f"it is no regular file of at most {most} bytes")
        return file.read(most)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON table in a file of a model folder, behind a byte order mark or without one.

    Raises:
        ModelNotFound: the file is missing, too large or cannot be read.
        UnsupportedModel: it holds no JSON table, or one too deep.
    """
    path = folder / name
    try:
        table = json.loads(read_file(path, MAX_JSON_BYTES).decode("utf-8-sig"))
    except OSError as error:
        must = "a model is a .gguf file, or a folder with config.json, *.safetensors and tokenizer files"
        raise ModelNotFound(f"{path} is missing or cannot be read ({error}): {must}") from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise UnsupportedModel(f"{path} must hold a JSON table, not {shown(table)}")
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(DenseConfig):
    """Qwen3: norms over each head of q and k, and one base of all rotations."""

    rope_theta: float


def read_config(folder: Path) -> Qwen3Config:
    """The config of a Qwen3 model, from its config.json (schemas of transformers 4 and 5).

    Raises:
        ModelNotFound: the file is missing.
        UnsupportedModel: another architecture, a feature that is not computed, or a field that is missing or wrong.
    """
    table = read_json(folder, "config.json")
    rope = table.get("rope_parameters") or {}
    table |= rope if isinstance(rope, dict) else {"rope_type": rope}
    table |= {"dtype": str(table.get("dtype") or table.get("torch_dtype") or "float32").removeprefix("torch.")}
    for key, supported in SUPPORTED.items():
        if (value := table.get(key)) not in supported:
            raise UnsupportedModel(f"{key} is {shown(value)} in {folder}/config.json: it must be one of {supported}")

    def read(key: str, default: Any = None, *, kind: type = int) -> Any:
        value = default if table.get(key) is None else table[key]
        if not (type(value) is kind if kind is bool else type(value) in (int, kind) and 0 < value < MAX_INT32):
            must = "true or false" if kind is bool else f"a positive {kind.__name__}"
            raise UnsupportedModel(f"{key} is {shown(value)} in {folder}/config.json: it must be {must}")
        return value

    bias, heads = read("attention_bias", False, kind=bool), read("num_attention_heads")
    config = Qwen3Config(
        architecture="Qwen3ForCausalLM",
        vocab_size=read("vocab_size"),
        hidden_size=read("hidden_size"),
        intermediate_size=read("intermediate_size"),
        num_layers=read("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=read("num_key_value_heads", heads),
        head_dim=read("head_dim", 128),
        max_position_embeddings=read("max_position_embeddings"),
        rms_norm_eps=read("rms_norm_eps", 1e-6, kind=float),
        rope_theta=read("rope_theta", 10_000.0, kind=float),
        tie_word_embeddings=read("tie_word_embeddings", False, kind=bool),
        dtype=table["dtype"],
        qkv_bias=bias,
        o_bias=bias,
    )
    if config.head_dim % 2:
        raise UnsupportedModel(f"head_dim is {config.head_dim}: it must be even, since pairs of dimensions are rotated")
    if heads % config.num_kv_heads:
        raise UnsupportedModel(f"num_attention_heads is {heads}: it must be a multiple of num_key_value_heads")
    return config
