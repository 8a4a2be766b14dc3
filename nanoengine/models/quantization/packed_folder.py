"""PackedFolder: the weights of a model folder whose layers were quantized before they were stored."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from nanoengine.errors import InvalidWeights
from nanoengine.kernels.quantized.tensor import QuantizedTensor
from nanoengine.models.checkpoint import FLOATS, TensorHeader
from nanoengine.models.quantization.layouts import layout_of
from nanoengine.models.quantization.scheme import Scheme
from nanoengine.models.safetensors_folder import SafetensorsFolder, release_mapped

CELL = 32
"""Kernels for CPUs keep whole numbers whose scales are those of a multiple of so many inputs; all others become numbers."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A quantized layer: where its tensors are, by suffix."""

    prefix: str
    shape: tuple[int, int]
    headers: dict[str, TensorHeader]
    file: str


class PackedFolder:
    """A `Checkpoint`: the tensors of a quantized layer are one quantized `prefix.weight`, all others are what they are.

    Only one layer at a time is in memory beside its place.

    Args:
        folder: of config.json and *.safetensors.
        scheme: what the former says of the latter.
    """

    def __init__(self, folder: Path, scheme: Scheme):
        self._folder, self._scheme, self._layout = SafetensorsFolder(folder), scheme, layout_of(scheme)
        self.place = self._folder.place

    @property
    def is_headless(self) -> bool:
        """See `SafetensorsFolder`."""
        return self._folder.is_headless

    def headers(self) -> Iterator[TensorHeader]:
        """The dtype of quantized layers is F32.

        Small tensors are read, too: those that say how the large ones are meant, and biases, since AutoGPTQ gave one of zeros to
        every layer.

        Raises:
            ModelNotFound, InvalidWeights: files that are missing or broken; a layer that lacks a tensor, or has one of another
                shape or dtype, or one that says what is not computed; the message names it.
        """
        layers: set[str] = set()
        with self._folder.reader() as read:
            for entry in self._entries():
                if isinstance(entry, Layer):
                    looked_at = {
                        suffix: read(entry.headers[suffix]) for suffix in self._layout.early & entry.headers.keys()
                    }
                    self._layout.check(f"{entry.prefix} in {self.place}", entry.shape, looked_at)
                    stays = self._scheme.layout != "float8" and (self._scheme.group or CELL) % CELL == 0
                    stored = sum(map(_stored_bytes, entry.headers.values())) if stays else None
                    shape = list(entry.shape)
                    yield TensorHeader(f"{entry.prefix}.weight", "F32", shape, entry.file, stored)
                    layers.add(entry.prefix)
                else:
                    prefix, _, suffix = entry.name.rpartition(".")
                    is_bias = suffix == "bias" and prefix in layers
                    is_zero = is_bias and not bool(read(entry).any())
                    yield TensorHeader(entry.name, entry.dtype, entry.shape, entry.file, adds_nothing=is_zero)

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        with self._folder.reader() as read:
            for entry in self._entries():
                if isinstance(entry, Layer):
                    parts = {suffix: read(header) for suffix, header in entry.headers.items()}
                    yield f"{entry.prefix}.weight", self._layout.read(parts, dtype)
                else:
                    parts = {"": read(entry)}
                    yield entry.name, parts[""]
                for tensor in parts.values():
                    release_mapped(tensor)

    def fingerprint(self) -> str:
        return xxhash.xxh3_128(f"{self._scheme} {self._folder.fingerprint()}".encode()).hexdigest()

    def _entries(self) -> Iterator[Layer | TensorHeader]:
        """All quantized layers, and all other tensors."""
        layers: dict[str, dict[str, TensorHeader]] = {}
        others: list[TensorHeader] = []
        headers = [(header, *header.name.rpartition(".")[::2]) for header in self._folder.headers()]
        for header, prefix, suffix in headers:
            if suffix == self._layout.body and not (suffix == "weight" and header.dtype in FLOATS):
                layers[prefix] = {}
        for header, prefix, suffix in headers:
            if prefix not in layers or suffix not in (self._layout.body, *self._layout.suffixes):
                others.append(header)
            elif suffix in layers[prefix]:
                files = f"{layers[prefix][suffix].file} and {header.file}"
                raise InvalidWeights(f"{self.place} has {header.name} twice, in {files}")
            else:
                layers[prefix][suffix] = header
        for prefix, parts in layers.items():
            yield self._layer(prefix, parts)
        yield from others

    def _layer(self, prefix: str, found: dict[str, TensorHeader]) -> Layer:
        """Its tensors that matter, if they are there and as they must be."""
        body, group = found[self._layout.body], self._scheme.group
        if len(body.shape) != 2:
            raise InvalidWeights(
                f"{body.name} in {self.place} is {body.dtype} {body.shape}: it must have two dimensions"
            )
        shape = self._layout.shape(body.shape)
        if group is not None and shape[1] % group:
            why = f"they must be whole groups of {group}, the group_size of the quantization_config"
            raise InvalidWeights(f"{prefix} in {self.place} has {shape[1]} inputs: {why}")
        headers = {}
        for suffix, part in self._layout.parts(*shape).items():
            header = found.get(suffix)
            if header is None:
                if part.needed:
                    raise InvalidWeights(f"{prefix}.{suffix} is missing in {self.place}, beside {body.name}")
                continue
            if tuple(header.shape) not in part.allowed.get(header.dtype, ()):
                allowed = " or ".join(f"{dtype} {list(s)}" for dtype, shapes in part.allowed.items() for s in shapes)
                why = f"beside {body.name} {body.shape}, and by the quantization_config, it must be {allowed}"
                raise InvalidWeights(f"{header.name} in {self.place} is {header.dtype} {header.shape}: {why}")
            headers[suffix] = header
        return Layer(prefix, shape, headers, body.file)


def _stored_bytes(header: TensorHeader) -> int:
    bits = int(re.sub(r"\D.*", "", header.dtype.lstrip("BFIUOL")) or 8)  # of U8, I32, BF16, F8_E4M3, BOOL
    return math.prod(header.shape) * bits // 8
