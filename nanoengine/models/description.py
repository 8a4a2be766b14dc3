"""The description of a model, read before any of its weights: from a folder's tables, or from the metadata of a GGUF file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoengine.core.tokenizer import end_token_ids
from nanoengine.models.architectures import read_model_config, text_table
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.gguf.translate import hf_config
from nanoengine.models.json_file import read_json
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.quantization.scheme import QUANTIZATION
from nanoengine.models.tokenizer import GGUFTokenizer, HFTokenizer, ModelTokenizer

SAMPLING = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
SAMPLING |= {"max_tokens": "max_new_tokens"}
"""Fields of `SamplingParams`, and what generation_config.json calls them."""

QUANTIZATIONS = (QUANTIZATION, "compression_config")
METHODS_BY_FILE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Where AutoGPTQ and AutoAWQ of old and ModelOpt tell of quantization; the last in a table `quantization` there."""


@dataclass(frozen=True, slots=True)
class Description:
    """A model's shape, its tokenizer, and all tokens that any of its files calls an end: they may differ, and each means it.

    `advised_sampling`: what generation_config.json says of sampling, unchecked, by the names of `SamplingParams`.
    `gguf`: the model's file, if it is a GGUF file: its vocabulary takes long to read.
    """

    config: ModelConfig
    tokenizer: ModelTokenizer
    eos_token_ids: list[int]
    advised_sampling: Mapping[str, Any]
    gguf: GGUFFile | None = None


def describe(
    path: Path,
    tokenizer: Path | None = None,
    chat_template: str | None = None,
    read: Callable[[Mapping[str, Any]], ModelConfig] = read_model_config,
) -> Description:
    """Read the description of the model at a path that `find_model` gave, with the tokenizer and the chat template of others, if
    they are given; `read` makes a config of the content of its config.json.

    Raises:
        ModelNotFound, UnsupportedModel, InvalidWeights: files that are missing, not supported, or broken.
    """
    file = None if path.is_dir() else GGUFFile.open(path)
    table = config_table(path) if file is None else hf_config(file)
    config = read(table)
    stated = [own.get("eos_token_id") for own in (table, text_table(table))]
    generation: Mapping[str, Any] = {}
    if path.is_dir() and os.path.lexists(path / "generation_config.json"):
        generation = read_json(path, "generation_config.json")
        stated.append(generation.get("eos_token_id"))
    if file is None or tokenizer is not None:
        own = path if tokenizer is None else tokenizer
        is_folder = own.is_dir()
        of_text: ModelTokenizer = (
            HFTokenizer(own, chat_template) if is_folder else GGUFTokenizer(GGUFFile.open(own).metadata, chat_template)
        )
    else:
        of_text = GGUFTokenizer(file.metadata, chat_template)
    ends = end_token_ids(config.vocab_size, *stated, of_text.eos_token_ids)
    values = {name: generation.get(theirs) for name, theirs in SAMPLING.items()}
    advised = {name: value for name, value in values.items() if value is not None}
    return Description(config, of_text, ends, advised, file)


def config_table(path: Path) -> Mapping[str, Any]:
    """The content of a model's config.json, or what a GGUF file says in its place; what a folder says of quantization, under
    another name, in the part for text or in a file of its own, is the `quantization_config`.
    """
    if not path.is_dir():
        return hf_config(GGUFFile.open(path))
    table = read_json(path, "config.json")
    stated = (own.get(key) for own in (table, text_table(table)) for key in QUANTIZATIONS)
    in_files = (
        {"quant_method": method, **_stated_in(read_json(path, name))}
        for name, method in METHODS_BY_FILE.items()
        if os.path.lexists(path / name)
    )
    table[QUANTIZATION] = next((found for found in itertools.chain(stated, in_files) if found is not None), None)
    return table


def _stated_in(content: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = content.get("quantization")
    return inner if isinstance(inner, Mapping) else content
