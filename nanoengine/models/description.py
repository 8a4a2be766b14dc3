"""The description of a model, read before any of its weights: from a folder's tables, or from the metadata of a GGUF file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoengine.core.model_config import read_json
from nanoengine.core.tokenizer import end_token_ids
from nanoengine.models.architectures import read_model_config, text_table
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.gguf.tokenizer import GGUFTokenizer
from nanoengine.models.gguf.translate import hf_config
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.quantization.scheme import QUANTIZATION
from nanoengine.models.tokenizer import HFTokenizer, ModelTokenizer

SAMPLING = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
SAMPLING |= {"max_tokens": "max_new_tokens"}
"""Fields of `SamplingParams`, and their names in generation_config.json."""

QUANTIZATIONS = (QUANTIZATION, "compression_config")
METHODS_BY_FILE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files with the quantization of old AutoGPTQ and AutoAWQ, and of ModelOpt, which has it in a table `quantization`."""


@dataclass(frozen=True, slots=True)
class Description:
    """A model's config, its tokenizer, and the end tokens of all its files, which may differ.

    `advised_sampling`: sampling values of generation_config.json, unchecked, by the names of `SamplingParams`.
    `gguf`: the open GGUF file, if it is one: its vocabulary is slow to read.
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
    """Read the description of a model.

    Args:
        path: from `find_model`.
        tokenizer: folder or GGUF file of another tokenizer.
        chat_template: replaces that of the tokenizer.
        read: makes a config of the content of a config.json.

    Raises:
        ModelNotFound, UnsupportedModel, InvalidWeights: files that are missing, not supported, or broken.
    """
    file = None if path.is_dir() else GGUFFile.open(path)
    table = config_table(path) if file is None else hf_config(file)
    config = read(table)
    stated = [part.get("eos_token_id") for part in (table, text_table(table))]
    generation: Mapping[str, Any] = {}
    if path.is_dir() and os.path.lexists(path / "generation_config.json"):
        generation = read_json(path, "generation_config.json")
        stated.append(generation.get("eos_token_id"))
    source, opened = tokenizer or path, None if tokenizer else file
    if source.is_dir():
        text_tokenizer: ModelTokenizer = HFTokenizer(source, chat_template)
    else:
        text_tokenizer = GGUFTokenizer((opened or GGUFFile.open(source)).metadata, chat_template)
    ends = end_token_ids(config.vocab_size, *stated, text_tokenizer.eos_token_ids)
    advised = {name: generation[key] for name, key in SAMPLING.items() if generation.get(key) is not None}
    return Description(config, text_tokenizer, ends, advised, file)


def config_table(path: Path) -> Mapping[str, Any]:
    """The content of a model's config.json, or its equivalent of a GGUF file. A folder's quantization, under another name, in the
    part for text or in a separate file, becomes the `quantization_config`.
    """
    if not path.is_dir():
        return hf_config(GGUFFile.open(path))
    table = read_json(path, "config.json")
    stated = (part.get(key) for part in (table, text_table(table)) for key in QUANTIZATIONS)
    in_files = (
        {"quant_method": method, **_stated_in(read_json(path, name))}
        for name, method in METHODS_BY_FILE.items()
        if os.path.lexists(path / name)
    )
    table[QUANTIZATION] = next((value for value in itertools.chain(stated, in_files) if value is not None), None)
    return table


def _stated_in(content: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = content.get("quantization")
    return inner if isinstance(inner, Mapping) else content
