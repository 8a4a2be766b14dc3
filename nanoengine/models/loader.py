"""Loading: find the files of a model, read its config, and copy its safetensors straight into the parameters.

Only data is read: JSON and safetensors. Nothing in a model folder is ever executed or unpickled.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from mmap import ACCESS_READ, MADV_DONTNEED, mmap
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from nanoengine.errors import InvalidWeights, ModelNotFound, UnsupportedModel
from nanoengine.kernels.interface import Destination

DEMO = Path(__file__).parent.parent / "demo"
DESCRIPTION_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHT_FILES = ("*.safetensors",)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def find_model(model: str, files: Sequence[str] = DESCRIPTION_FILES) -> Path:
    """The folder of a model: "demo" is the bundled one, then local folders, then repositories of the hub.

    From the hub, only `files` (patterns) are fetched: config and tokenizer are looked at before gigabytes of weights.

    Raises:
        ModelNotFound: none of these.
    """
    if model == "demo":
        return DEMO
    folder = Path(os.path.expanduser(model))  # as Path.expanduser, but an unknown user's ~ stays as it is
    if folder.is_dir():
        return folder
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ModelNotFound(
            f"model {model!r} is no folder: give 'demo', a folder with a config.json, or a hub name like 'Qwen/Qwen3-0.6B'"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(files)))
    except Exception as error:  # of the many kinds that the hub client raises, all mean "not to be had"
        raise ModelNotFound(f"model {model!r} is no folder, and the hub did not give it: {error}") from error


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON table in `folder / name`.

    Raises:
        ModelNotFound: no such file.
        UnsupportedModel: it is not a JSON table.
    """
    path = folder / name
    if not path.is_file():
        raise ModelNotFound(f"{path} is missing: a model folder needs config.json, *.safetensors and tokenizer files")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} must hold a JSON table, not {type(content).__name__}")
    return content


def load_weights(tensors: Mapping[str, Destination], folder: Path, *, use_tqdm: bool = True) -> None:
    """Copy every tensor of the checkpoint in `folder` into its place in `tensors`, converted to the dtype there.

    The files are memory-mapped, and what was copied is unmapped at once, so that weights are in memory once, in their place.

    Raises:
        ModelNotFound: no safetensors, or a shard of the index is missing.
        InvalidWeights: a broken file; tensors that are missing, unexpected, repeated or misshapen. The message names
            them.
    """
    missing = dict.fromkeys(tensors)
    repeated: list[str] = []
    misshapen: list[str] = []
    unexpected: dict[str, Tensor] = {}
    embedding: Tensor | None = None
    with tqdm(total=len(tensors), desc="Loading weights", unit="tensor", disable=not use_tqdm, leave=False) as bar:
        for path in _weight_files(folder):
            for name, source in _read_tensors(path):
                target = tensors.get(name)
                if target is None:
                    unexpected[name] = source
                    continue
                if name not in missing:
                    repeated.append(f"{name} in {path.name}")
                    continue
                missing.pop(name)
                if source.shape != target.shape or not source.is_floating_point():
                    misshapen.append(f"{name} is {source.dtype} {list(source.shape)}, not a float {list(target.shape)}")
                    continue
                target.copy_(source)
                _release(source)
                if name == EMBEDDING:
                    embedding = source
                bar.update()

    if HEAD in unexpected and embedding is not None:
        # The model is tied; a checkpoint may repeat the embedding, but not contradict it.
        head = unexpected.pop(HEAD)
        if head.shape != embedding.shape or not torch.equal(head.to(embedding), embedding):
            raise InvalidWeights(
                f"the weights in {folder} have an lm_head.weight that is not the embedding, but tie_word_embeddings is true: "
                "correct one of the two"
            )
    problems = {"missing": list(missing), "unexpected": list(unexpected), "repeated": repeated, "misshapen": misshapen}
    if any(problems.values()):
        lines = [f"{kind} ({len(names)}): {_some(names)}" for kind, names in problems.items() if names]
        raise InvalidWeights(f"the weights in {folder} do not match the config.json beside them: " + "; ".join(lines))


def weights_fingerprint(folder: Path) -> str:
    """A hash of all weights in `folder`, at the speed of reading them."""
    digest = xxhash.xxh3_128()
    for path in _weight_files(folder):
        with open(path, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            digest.update(content)
    return digest.hexdigest()


def _read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping, it has keys() only
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise InvalidWeights(f"{path} cannot be read as safetensors: {error}") from error


def _release(tensor: Tensor) -> None:
    """Give back the memory of a tensor that is mapped from a file; it is read again should anyone look at it."""
    page = os.sysconf("SC_PAGE_SIZE")
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if sys.platform == "linux" and end > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(folder, index.name).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InvalidWeights(f"{index} has no weight_map from tensor names to file names")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        for path in files:
            if path.parent != folder:
                raise InvalidWeights(f"{index} names {path.name!r} outside the model folder")
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelNotFound(f"{folder} holds no *.safetensors: other formats are not read, because they can run code")
    for path in files:
        if not path.is_file():
            raise ModelNotFound(f"{path} is missing, though {index.name} lists it: fetch the model again")
    return files


def _some(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
