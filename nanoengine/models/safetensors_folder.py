"""SafetensorsFolder: the core's, with tensors read in any order, and a hash of its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from mmap import ACCESS_READ, mmap
from typing import Any

import torch
import xxhash
from torch import Tensor

from nanoengine.core import weights as core
from nanoengine.core.weights import TensorHeader, open_file


class SafetensorsFolder(core.SafetensorsFolder):
    """A `Checkpoint` of the *.safetensors in a folder."""

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        return super().tensors()

    @contextmanager
    def reader(self) -> Iterator[Callable[[TensorHeader], Tensor]]:
        """Reads any tensor by what `headers` said of it, mapped from its file, which is opened when the first of it is wanted."""
        with ExitStack() as stack:
            files: dict[str, Any] = {}

            def read(header: TensorHeader) -> Tensor:
                if header.file not in files:
                    files[header.file] = stack.enter_context(open_file(self.folder / header.file))
                tensor: Tensor = files[header.file].get_tensor(header.name)
                return tensor

            yield read

    def fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        for path in self.files():
            with open(path, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
                digest.update(content)
        return digest.hexdigest()
