"""Names of the fields that transformers, peft and llama.cpp's package gguf read: `python -m tests.models.field_names` writes
them beside `models/config_fields.py`.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import peft
import transformers

from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.config_fields import NAMES_FILE

ROOT = Path(inspect.getfile(transformers)).parent
SHARED = (
    *("configuration_utils", "modeling_utils", "modeling_rope_utils", "modeling_layers", "masking_utils"),
    *("cache_utils", "integrations/moe", "integrations/*_attention"),
)
"""Modules that every model goes through."""

QUANTIZERS = ("AwqConfig", "GPTQConfig", "CompressedTensorsConfig", "FineGrainedFP8Config", "Mxfp4Config")
BESIDE = (
    *("format", "quantization_status", "transform_config", "targets", "weights", "input_activations"),
    *("output_activations", "group_size", "w_bit", "q_group_size", "checkpoint_format", "pack_dtype", "dynamic"),
    *("adapter", "rotation", "is_marlin_format", "data_type", "super_bits", "super_group_size", "extra_config"),
    *("act_bits", "act_group_size", "act_sym", "act_dynamic", "act_data_type", "packing_format", "fmt"),
    "static_groups",
)
"""What compressed-tensors, AutoAWQ, GPTQModel and AutoRound read of a quantization_config, beside transformers."""


def names_read() -> dict[str, Any]:
    """Versions; and by kind of table and whose it is, the names read there: fields of its class, attributes of a config."""
    kinds = [getattr(transformers, name) for name in ARCHITECTURES if hasattr(transformers, name)]
    folders = {Path(inspect.getfile(kind)).parent for kind in kinds}
    shared = set(_names(path for pattern in SHARED for path in ROOT.glob(f"{pattern}.py")))
    common = transformers.PreTrainedConfig()
    internal = {name for name in dir(common) if name not in common.to_dict()}
    models = {
        folder.name: set(_names([*folder.glob("configuration_*.py"), *folder.glob("modeling_*.py")]))
        - shared
        - internal
        for folder in folders
    }
    quantizers = [getattr(transformers.utils.quantization_config, name) for name in QUANTIZERS]
    lora = [field.name for field in dataclasses.fields(peft.LoraConfig)]
    keys = list(_texts(gguf.constants.Keys))
    tables = {
        "model": models | {"": {*shared, "torch_dtype"} - internal},
        "quantization": {"": {*BESIDE, *(name for kind in quantizers for name in inspect.signature(kind).parameters)}},
        "adapter": {"": set(lora)},
        "gguf": {"": {name.removeprefix("{arch}.") for name in keys if name.startswith(("{arch}.", "tokenizer."))}},
    }
    versions = {package: importlib.metadata.version(package) for package in ("transformers", "peft", "gguf")}
    return {"versions": versions} | {
        kind: {name: sorted(names) for name, names in sorted(of.items())} for kind, of in tables.items()
    }


def _texts(table: type) -> Iterator[str]:
    for value in vars(table).values():
        if inspect.isclass(value):
            yield from _texts(value)
        elif isinstance(value, str):
            yield value


def _names(paths: Iterable[Path]) -> Iterator[str]:
    is_config = re.compile(r"([\w.]+\.)?(text_|vision_|self_)?config(\.get_text_config\(.*\))?").fullmatch
    taking = ("configuration_", "modeling_rope")  # whose keywords are fields
    nodes = ((path.name.startswith(taking), node) for path in paths for node in ast.walk(ast.parse(path.read_text())))
    for takes_fields, node in nodes:
        match node:
            case ast.Attribute(value=owner, attr=name) if is_config(ast.unparse(owner)):
                yield name
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, ast.Constant(value=str(name)), *_]):
                if is_config(ast.unparse(owner)):
                    yield name
            case ast.ClassDef(name=owner) if owner.endswith("Config"):
                yield from (one.target.id for one in node.body if isinstance(one, ast.AnnAssign))
            case ast.Assign(targets=[ast.Name(id="attribute_map")], value=ast.Dict(keys=keys)):
                yield from (key.value for key in keys)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="kwargs"), attr="pop" | "get"), args=[ast.Constant(value=name), *_]
            ) if takes_fields:
                yield name


if __name__ == "__main__":
    NAMES_FILE.write_text(json.dumps(names_read(), indent=0) + "\n")
