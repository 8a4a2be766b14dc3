"""GGUF files of model folders as llama.cpp's converter writes them, with the gguf package and its table of names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES
from gguf.quants import quantize
from safetensors.torch import load_file
from torch import Tensor

from tests.models.gguf.written_keys import kinds_of_layers, metadata
from tests.models.gguf.written_tensors import converted

F32 = GGMLQuantizationType.F32
ARCHITECTURES = {arch.name.replace("_", "").lower(): arch for arch in MODEL_ARCH}
OTHERS = {
    "mixtral": "llama",
    "ministral3": "mistral3",
    "granitemoeshared": "granitemoe",
    "granitemoehybrid": "granitehybrid",
    "olmo3": "olmo2",
    "hunyuanv1dense": "hunyuandense",
}
"""Model types of Hugging Face whose architecture has another name, both without underscores."""


def write_gguf(
    folder: Path,
    path: Path,
    kind: GGMLQuantizationType = F32,
    more_tensors: Mapping[str, Tensor] | None = None,
    *,
    architecture: str | None = None,
    rename: Callable[[str], str] = str,
    legacy: bool = False,
    **keys: Any,
) -> Path:
    """The model of a folder, its matrices in the format `kind`.

    Args:
        more_tensors: further ones, under their names in the file.
        architecture: the name of another that is computed in the same way.
        rename: of names in the file.
        legacy: Qwen3-Next as it was converted first, with its projections in one tensor.
        keys: further ones of the architecture, or other values; "__" stands for a dot, None is left out.
    """
    config = json.loads((folder / "config.json").read_text())
    model_type = config["model_type"].removesuffix("_text").replace("_", "")
    has_experts = "moe" in config.get("layers_block_type", ())  # of Nemotron-H
    arch = ARCHITECTURES[OTHERS.get(model_type, model_type) + ("moe" if has_experts else "")]
    name_of_arch = architecture or MODEL_ARCH_NAMES[arch]
    values = metadata(config) | {key.replace("__", "."): value for key, value in keys.items()}
    values = {f"{name_of_arch}.{key}": value for key, value in values.items() if value is not None}
    names = get_tensor_name_map(arch, len(kinds_of_layers(config)))
    stored: dict[str, Tensor] = {}
    for name, tensor in converted(load_file(folder / "model.safetensors"), config, legacy).items():
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        stored[rename(known or name)] = tensor
        assert known or name.startswith("blk."), name
    stored |= more_tensors or {}
    arrays = {name: tensor.float().contiguous().numpy() for name, tensor in stored.items()}
    return write_file(path, name_of_arch, values, arrays, kind)


def write_file(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kind: GGMLQuantizationType | None = None,
) -> Path:
    """A file of these keys and tensors, its matrices in the format `kind`; None: as they are."""
    writer = GGUFWriter(path, architecture)
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, data in tensors.items():
        is_whole = kind is not None and data.ndim > 1 and data.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0
        form = None if kind is None else kind if is_whole else F32
        writer.add_tensor(name, data if form is None else quantize(np.ascontiguousarray(data), form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
