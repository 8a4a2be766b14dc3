"""Loading: compare the safetensors of a model with its shape, and copy them straight into the parameters.

Only data is read: JSON and safetensors. Nothing in a model folder is ever executed or unpickled.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from mmap import ACCESS_READ, MADV_DONTNEED, mmap
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.config import ModelConfig
from nanoengine.errors import InvalidWeights, ModelNotFound, shown
from nanoengine.kernels.interface import Destination
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.models.json_file import read_json
from nanoengine.models.registry import build_model
from nanoengine.progress import stage

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLOATS = ("F64", "F32", "F16", "BF16")


def check_weights(config: ModelConfig, folder: Path) -> None:
    """See from the headers of the files in `folder` that they hold the weights of a model, before any memory is taken for it.

    Raises:
        ModelNotFound, InvalidWeights: as `load_weights`.
    """
    model = build_model(config, TorchKernels(), TorchAttention(1), torch.float32, torch.device("meta"))
    _compare({name: place.shape for name, place in model.checkpoint_tensors().items()}, folder)


def load_weights(tensors: Mapping[str, Destination], folder: Path, *, use_tqdm: bool = True) -> None:
    """Copy every tensor of the checkpoint in `folder` into its place in `tensors`, converted to the dtype there.

    The files are memory-mapped, and what was copied is unmapped at once, so that weights are in memory once, in their place.

    Raises:
        ModelNotFound: no safetensors, or a shard of the index is missing.
        InvalidWeights: a broken file; tensors that are missing, unexpected, repeated or misshapen (the message names
            them, and nothing was copied); a tied model with a head of its own.
    """
    _compare({name: place.shape for name, place in tensors.items()}, folder)
    tied: dict[str, Tensor] = {}
    with stage("Loading weights", len(tensors), "tensor", shown=use_tqdm) as advance:
        for path in _weight_files(folder):
            for name, source in _read_tensors(path):
                if name in tensors:
                    tensors[name].copy_(source)
                    _release(source)
                    advance()
                if name in (EMBEDDING, HEAD):
                    tied[name] = source
    if HEAD in tied and HEAD not in tensors and not torch.equal(tied[HEAD].to(tied[EMBEDDING]), tied[EMBEDDING]):
        raise InvalidWeights(
            f"the weights in {folder} have an lm_head.weight that is not the embedding, but tie_word_embeddings is true: "
            "correct one of the two"
        )


def _compare(shapes: Mapping[str, Sequence[int]], folder: Path) -> None:
    """Raise InvalidWeights unless the headers of the files have exactly these tensors, of some float dtype."""
    missing = dict.fromkeys(shapes)
    unexpected: list[str] = []
    repeated: list[str] = []
    misshapen: list[str] = []
    for path in _weight_files(folder):
        for name, dtype, shape in _read_header(path):
            # A tied checkpoint may repeat the embedding as its head; whether they are equal is seen when they are loaded.
            expected = shapes.get(EMBEDDING if name == HEAD and HEAD not in shapes else name)
            if expected is None:
                unexpected.append(name)
                continue
            if name in shapes and name not in missing:
                repeated.append(f"{name} in {path.name}")
                continue
            missing.pop(name, None)
            if tuple(shape) != tuple(expected) or dtype not in FLOATS:
                misshapen.append(f"{name} is {dtype} {shape}, not a float {list(expected)}")
    problems = {"missing": list(missing), "unexpected": unexpected, "repeated": repeated, "misshapen": misshapen}
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


def _read_header(path: Path) -> Iterator[tuple[str, str, list[int]]]:
    """Name, dtype and shape of each tensor of a file."""
    with _open(path) as file:
        for name in file.keys():  # noqa: SIM118 - no mapping, it has keys() only
            header = file.get_slice(name)
            yield name, header.get_dtype(), header.get_shape()


def _read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with _open(path) as file:
        for name in file.keys():  # noqa: SIM118 - no mapping, it has keys() only
            yield name, file.get_tensor(name)


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
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
    if os.path.lexists(index):
        weight_map = read_json(folder, index.name).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InvalidWeights(f"{index} has no weight_map from tensor names to file names")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        for path in files:
            if path.parent != folder:
                raise InvalidWeights(f"{index} names {shown(path.name)} outside the model folder")
    elif os.path.isfile(folder / "model.safetensors"):
        files = [folder / "model.safetensors"]
    else:
        files = sorted(path for path in folder.glob("*.safetensors") if os.path.isfile(path))
    if not files:
        raise ModelNotFound(f"{folder} holds no *.safetensors: other formats are not read, because they can run code")
    for path in files:
        if not os.path.isfile(path):
            raise ModelNotFound(f"{_brief(str(path))} is missing, though {index.name} lists it: fetch the model again")
    return files


def _some(names: list[str], limit: int = 5) -> str:
    return ", ".join(map(_brief, names[:limit])) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _brief(text: str, limit: int = 500) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
