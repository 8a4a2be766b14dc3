"""Weights: the *.safetensors of a model folder, memory-mapped and copied into the slots of a model. Nothing is ever unpickled."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoengine.core.errors import InvalidWeights, ModelNotFound, shown
from nanoengine.core.kernels import WeightSlot
from nanoengine.core.model_config import read_json

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What is known of a tensor without reading it."""

    name: str
    dtype: str  # one of FLOATS, if it can be loaded
    shape: list[int]
    file: str  # for messages


class SafetensorsFolder:
    """The weights of a model folder. All methods raise ModelNotFound for missing files, and InvalidWeights for broken ones."""

    def __init__(self, folder: Path):
        self.folder, self.place = folder, str(folder)

    def headers(self) -> Iterator[TensorHeader]:
        for path in self.files():
            with open_file(path) as file:
                for name in file.keys():  # noqa: SIM118 - no mapping, it has keys() only
                    header = file.get_slice(name)
                    yield TensorHeader(name, header.get_dtype(), header.get_shape(), path.name)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What was yielded is unmapped when the next is asked for, so that weights are in memory once, in their slots."""
        for path in self.files():
            with open_file(path) as file:
                for name in file.keys():  # noqa: SIM118
                    tensor = file.get_tensor(name)
                    yield name, tensor
                    release_mapped(tensor)

    def files(self) -> list[Path]:
        """Those of the index, or model.safetensors, or all."""
        index = self.folder / "model.safetensors.index.json"
        files = sorted(path for path in self.folder.glob("*.safetensors") if path.is_file())
        if os.path.lexists(index):
            weight_map = read_json(self.folder, index.name).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
                raise InvalidWeights(f"{index} has no weight_map from tensor names to file names")
            files = [self.folder / name for name in sorted(set(weight_map.values()))]
        elif self.folder / "model.safetensors" in files:
            files = [self.folder / "model.safetensors"]
        for path in files:
            if path.parent != self.folder:
                raise InvalidWeights(f"{index} names {shown(path.name)} outside the model folder")
            if not os.path.isfile(path):
                raise ModelNotFound(
                    f"{str(path)[:500]} is missing, though {index.name} lists it: fetch the model again"
                )
        if not files:
            raise ModelNotFound(
                f"{self.folder} holds no *.safetensors: a GGUF file is given by its own name, and other formats can run code"
            )
        return files


@contextmanager
def open_file(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InvalidWeights(f"{path} cannot be read as safetensors: {error}") from error


def release_mapped(tensor: Tensor) -> None:
    """Give back the memory of a tensor that is mapped from a file; it is read again should anyone look at it."""
    page = os.sysconf("SC_PAGE_SIZE")
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if sys.platform == "linux" and end > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def load_weights(slots: Mapping[str, WeightSlot], folder: SafetensorsFolder) -> None:
    """Copy every tensor of a folder into its slot, converted to the dtype there.

    Raises InvalidWeights if the tensors do not match the slots; then nothing was copied.
    """
    check_headers({name: slot.shape for name, slot in slots.items()}, folder.headers(), folder.place)
    for name, tensor in folder.tensors():
        if name in slots:
            slots[name].copy_(tensor)


def check_headers(shapes: Mapping[str, Sequence[int]], headers: Iterable[TensorHeader], place: str) -> None:
    """Raise InvalidWeights unless there are exactly these tensors, each once, of some float dtype; and perhaps a tied head."""
    missing = dict.fromkeys(shapes)
    unexpected: list[str] = []
    repeated: list[str] = []
    misshapen: list[str] = []
    for header in headers:
        name = header.name
        expected = shapes.get(EMBEDDING if name == HEAD and HEAD not in shapes else name)
        if expected is None:
            unexpected.append(name)
        elif name in shapes and name not in missing:
            repeated.append(f"{name} in {header.file}")
        elif tuple(header.shape) != tuple(expected) or header.dtype not in FLOATS:
            misshapen.append(f"{name} is {header.dtype} {header.shape}, not a float {list(expected)}")
        missing.pop(name, None)
    problems = {"missing": list(missing), "unexpected": unexpected, "repeated": repeated, "misshapen": misshapen}
    lines = [f"{kind} ({len(names)}): {_some(names)}" for kind, names in problems.items() if names]
    if lines:
        raise InvalidWeights(f"the weights in {place} do not match the config beside them: " + "; ".join(lines))


def _some(names: list[str]) -> str:
    return ", ".join(name[:500] for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
