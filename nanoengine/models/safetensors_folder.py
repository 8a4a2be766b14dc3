"""SafetensorsFolder: the *.safetensors of a model folder, memory-mapped, without unpickling."""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from nanoengine.core.errors import InvalidWeights
from nanoengine.core.model_config import read_json
from nanoengine.core.weights import open_file, weight_files
from nanoengine.kernels.quantized.tensor import QuantizedTensor
from nanoengine.models.checkpoint import TensorHeader
from nanoengine.sizes import format_bytes

logger = logging.getLogger("nanoengine")

MAX_HEADER_BYTES = 16 << 20
"""Limit of the header of a file; 30 billion numbers in quantized experts have 11 MB."""

BASE = "model."
"""Prefix of the names of all tensors but the head."""

TEXT, WHOLE = "model.language_model.", "language_model."
"""Prefixes of names in multimodal models; the second is a prefix of all names, the head included (Llama 4)."""

RENAMED = {
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "backbone.": BASE,
    TEXT: BASE,
}
"""Other prefixes of names; the first match counts (Nemotron-H)."""

DROPPED = re.compile(
    r"(model\.)?(visual|vision_tower|vision_model|vision_embedder|embed_vision|audio_tower|embed_audio|multi_modal_projector)\.|"
    r"mtp\."
)
"""Prefixes of tensors that are not computed: vision, audio, and multi-token prediction (Qwen3.5)."""

AHEAD = re.compile(r"model\.(mtp_|layers\.(\d{1,9})\.)")
"""Prefixes of other multi-token prediction: ERNIE 4.5's, and layers after the last (GLM-4.5)."""

COMPUTED_HERE = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")
"""RoPE tables, which old versions of transformers saved (Llama 2, TinyLlama), and no version reads."""

LEFT_OUT = (
    "%s: %d tensors (such as %s) of vision and of multi-token prediction are left out: this engine computes text, a token at a "
    "time"
)


class SafetensorsFolder:
    """A `Checkpoint`. All methods raise ModelNotFound for missing files, and InvalidWeights for broken ones."""

    def __init__(self, folder: Path):
        self.folder, self.location = folder, str(folder)

    @cached_property
    def is_headless(self) -> bool:
        """Whether a model was saved without its head, as embedding models are: then no name has the prefix `BASE`.

        The first of several files may have the embedding only, so all files are searched for a decisive name.
        """
        for path in weight_files(self.folder):
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118 - no mapping, it has keys() only
                    if name.startswith(("layers.", BASE, WHOLE)):
                        return bool(name.startswith("layers."))
        return False

    @cached_property
    def num_layers(self) -> float:
        """The number of layers, if config.json has layers of multi-token prediction after them; else infinity."""
        table = read_json(self.folder, "config.json") if (self.folder / "config.json").is_file() else {}
        has_more = table.get("num_nextn_predict_layers") or table.get("num_mtp_layers")
        count = table.get("num_hidden_layers")
        return count if has_more and isinstance(count, int) else math.inf

    def _is_dropped(self, name: str) -> bool:
        if (ahead := AHEAD.match(name)) is not None:
            return ahead[2] is None or int(ahead[2]) >= self.num_layers
        return DROPPED.match(name) is not None

    def _named(self, name: str) -> str:
        name = BASE + name if self.is_headless else name.removeprefix(WHOLE)
        theirs = next(filter(name.startswith, RENAMED), "")
        return RENAMED.get(theirs, "") + name.removeprefix(theirs)

    def _names(self, file: Any) -> dict[str, str]:
        """Names of the tensors of a file that are loaded: name here -> name in the file."""
        names = (name for name in file.keys() if not (self._is_dropped(name) or COMPUTED_HERE.fullmatch(name)))  # noqa: SIM118
        return {self._named(name): name for name in names}

    def headers(self) -> Iterator[TensorHeader]:
        for path in weight_files(self.folder):
            with _open(path) as file:
                for name, theirs in self._names(file).items():
                    header = file.get_slice(theirs)
                    yield TensorHeader(name, header.get_dtype(), header.get_shape(), path.name)

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        """Each tensor; its memory is released at the next, so that weights are in memory once, in their slots."""
        dropped: list[str] = []
        for path in weight_files(self.folder):
            with _open(path) as file:
                dropped += filter(self._is_dropped, file.keys())
                for name, theirs in self._names(file).items():
                    tensor = file.get_tensor(theirs)
                    yield name, tensor
                    release_mapped(tensor)
        if dropped:
            logger.warning(LEFT_OUT, self.location, len(dropped), dropped[0])

    @contextmanager
    def reader(self) -> Iterator[Callable[[TensorHeader], Tensor]]:
        """A function that reads a tensor by its header, mapped from its file.

        The memory of a tensor is released at the next read, and of all tensors at the end; released tensors can be read again.
        """
        with ExitStack() as stack:
            files: dict[str, tuple[Any, dict[str, str]]] = {}
            tensors: list[Tensor] = []

            def read(header: TensorHeader) -> Tensor:
                if header.file not in files:
                    opened = stack.enter_context(_open(self.folder / header.file))
                    files[header.file] = opened, self._names(opened)
                if tensors:
                    release_mapped(tensors[-1])
                file, names = files[header.file]
                tensors.append(file.get_tensor(names[header.name]))
                return tensors[-1]

            yield read
            for tensor in tensors:
                release_mapped(tensor)

    def fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        for path in weight_files(self.folder):
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                digest.update(content)
        return digest.hexdigest()


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """As `open_file`, with a limit of the header: a tensor in it costs a kilobyte and 10 microseconds."""
    size = 0
    with suppress(OSError), open(path, "rb") as file:  # `open_file` raises the reason
        size = int.from_bytes(file.read(8), "little")
    if MAX_HEADER_BYTES < size < path.stat().st_size:  # `open_file` refuses a header beyond the end of the file
        raise InvalidWeights(
            f"{path} has a header of {format_bytes(size)}, more than {format_bytes(MAX_HEADER_BYTES)}: use several files"
        )
    with open_file(path) as opened:
        yield opened


def release_mapped(tensor: Tensor) -> None:
    """Release the memory of a tensor that is mapped from a file; an access reads it again."""
    page = os.sysconf("SC_PAGE_SIZE")
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if sys.platform == "linux" and end > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
