"""SafetensorsFolder: the weights of a Hugging Face model folder, memory-mapped. Nothing in it is ever executed or unpickled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoengine.core.model_config import read_json
from nanoengine.errors import InvalidWeights, ModelNotFound, shown
from nanoengine.kernels.memory import release_mapped
from nanoengine.models.checkpoint import TensorHeader


class SafetensorsFolder:
    """A `Checkpoint` of the *.safetensors in a folder."""

    def __init__(self, folder: Path):
        self.folder, self.place = folder, str(folder)

    def headers(self) -> Iterator[TensorHeader]:
        for path in self._files():
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118 - no mapping, it has keys() only
                    header = file.get_slice(name)
                    yield TensorHeader(name, header.get_dtype(), header.get_shape(), path.name)

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:  # noqa: ARG002 - places convert as they copy
        """What was read is unmapped at once, so that weights are in memory once, in their place."""
        for path in self._files():
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118
                    tensor = file.get_tensor(name)
                    yield name, tensor
                    release_mapped(tensor)

    @contextmanager
    def reader(self) -> Iterator[Callable[[TensorHeader], Tensor]]:
        """Reads any tensor by what `headers` said of it, mapped from its file, which is opened when the first of it is wanted."""
        with ExitStack() as stack:
            files: dict[str, Any] = {}

            def read(header: TensorHeader) -> Tensor:
                if header.file not in files:
                    files[header.file] = stack.enter_context(_open(self.folder / header.file))
                tensor: Tensor = files[header.file].get_tensor(header.name)
                return tensor

            yield read

    def fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        for path in self._files():
            with open(path, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
                digest.update(content)
        return digest.hexdigest()

    def _files(self) -> list[Path]:
        folder = self.folder
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
            raise ModelNotFound(
                f"{folder} holds no *.safetensors: a GGUF file is given by its own name, and other formats can run code"
            )
        for path in files:
            if not os.path.isfile(path):
                raise ModelNotFound(
                    f"{brief(str(path))} is missing, though {index.name} lists it: fetch the model again"
                )
        return files


def brief(text: str, limit: int = 500) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InvalidWeights(f"{path} cannot be read as safetensors: {error}") from error
