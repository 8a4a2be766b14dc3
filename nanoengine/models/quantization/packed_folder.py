"""PackedFolder: a model folder with quantized layers."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from nanoengine.errors import InvalidWeights
from nanoengine.kernels.quantized.tensor import QuantizedTensor
from nanoengine.models.checkpoint import FLOATS, TensorHeader
from nanoengine.models.quantization.layout import Layout
from nanoengine.models.quantization.layouts import layout_of
from nanoengine.models.quantization.scheme import Scheme
from nanoengine.models.safetensors_folder import SafetensorsFolder, release_mapped

KV_SCALES = re.compile(r".*attn\..*\b([qkv]|output)_(scale|zero_point)")
"""Scales of a quantized KV cache. The KV cache does not use them, so they have no effect."""

logger = logging.getLogger("nanoengine")


@dataclass(frozen=True, slots=True)
class Layer:
    """A quantized layer: the headers of its tensors by suffix."""

    prefix: str
    layout: Layout
    shape: tuple[int, int]
    headers: dict[str, TensorHeader]


class PackedFolder(SafetensorsFolder):
    """A `Checkpoint`: the tensors of a quantized layer are one quantized `prefix.weight`; others are unchanged.

    One layer at a time is in memory beside its slot.

    Args:
        folder: of config.json and *.safetensors.
        scheme: the quantization of the config.json.
    """

    def __init__(self, folder: Path, scheme: Scheme):
        super().__init__(folder)
        self._scheme, self._layouts = scheme, [layout_of(each) for each in (scheme, *scheme.others)]

    def headers(self) -> Iterator[TensorHeader]:
        """The headers; the dtype of quantized layers is F32.

        Small tensors are read, too: those of `Layout.early`, and biases, since AutoGPTQ stores a bias of zeros for each layer.

        Raises:
            ModelNotFound, InvalidWeights: files that are missing or broken; a layer without a tensor, or with one of
                another shape, dtype or order of inputs; the message names the tensor.
        """
        layers: set[str] = set()
        with super().reader() as read:
            for entry in self._entries():
                if isinstance(entry, Layer):
                    early = {name: read(entry.headers[name]) for name in entry.layout.early & entry.headers.keys()}
                    entry.layout.check(f"{entry.prefix} in {self.location}", entry.shape, early)
                    headers, file = entry.headers.values(), entry.headers[entry.layout.body].file
                    stored = sum(map(_stored_bytes, headers)) if entry.layout.stays_packed else None
                    yield TensorHeader(f"{entry.prefix}.weight", "F32", list(entry.shape), file, stored)
                    layers.add(entry.prefix)
                else:
                    prefix, _, suffix = entry.name.rpartition(".")
                    is_bias = suffix == "bias" and prefix in layers
                    is_nothing = (is_bias and not bool(read(entry).any())) or bool(KV_SCALES.fullmatch(entry.name))
                    yield TensorHeader(entry.name, entry.dtype, entry.shape, entry.file, adds_nothing=is_nothing)

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        left_out = 0
        with super().reader() as read:
            for entry in self._entries():
                if isinstance(entry, Layer):
                    parts = {suffix: read(header) for suffix, header in entry.headers.items()}
                    yield f"{entry.prefix}.weight", self._matrix(entry, parts, dtype or torch.float32)
                elif KV_SCALES.fullmatch(entry.name):
                    left_out += 1
                    continue
                else:
                    parts = {"": read(entry)}
                    yield entry.name, parts[""]
                for tensor in parts.values():
                    release_mapped(tensor)
        if left_out:
            logger.warning(
                "%s: %d scales of a KV cache are left out: K/V is stored in the dtype of the model",
                self.location,
                left_out,
            )

    @contextmanager
    def reader(self) -> Iterator[Callable[[TensorHeader], Tensor]]:
        """A function that reads a tensor by its header; quantized layers are dequantized to float32."""
        layers = {f"{entry.prefix}.weight": entry for entry in self._entries() if isinstance(entry, Layer)}
        with super().reader() as read:

            def dequantized(header: TensorHeader) -> Tensor:
                if (layer := layers.get(header.name)) is None:
                    return read(header)
                parts = {suffix: read(part) for suffix, part in layer.headers.items()}
                matrix = self._matrix(layer, parts, torch.float32)
                return matrix if isinstance(matrix, Tensor) else matrix.dequantize(torch.float32)

            yield dequantized

    def _matrix(self, layer: Layer, parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor | QuantizedTensor:
        try:
            return layer.layout.read(parts, dtype)
        except InvalidWeights as error:
            raise InvalidWeights(f"{layer.prefix} in {self.location}: {error}") from error

    def fingerprint(self) -> str:
        return xxhash.xxh3_128(f"{self._scheme} {super().fingerprint()}".encode()).hexdigest()

    def _entries(self) -> Iterator[Layer | TensorHeader]:
        """The quantized layers, then the other tensors."""
        layers: dict[str, dict[str, TensorHeader]] = {}
        others: list[TensorHeader] = []
        bodies = {layout.body for layout in self._layouts}
        suffixes = bodies.union(*(layout.suffixes for layout in self._layouts))
        headers = [(header, *header.name.rpartition(".")[::2]) for header in super().headers()]
        for header, prefix, suffix in headers:
            if suffix in bodies and not (suffix == "weight" and header.dtype in FLOATS):
                layers[prefix] = {}
        for header, prefix, suffix in headers:
            if prefix not in layers or suffix not in suffixes:
                others.append(header)
            elif suffix in layers[prefix]:
                files = f"{layers[prefix][suffix].file} and {header.file}"
                raise InvalidWeights(f"{self.location} has {header.name} twice, in {files}")
            else:
                layers[prefix][suffix] = header
        for prefix, parts in layers.items():
            yield self._layer(prefix, parts)
        yield from others

    def _layer(self, prefix: str, tensors: dict[str, TensorHeader]) -> Layer:
        """A layer in the layout that matches its tensors."""
        layers, errors = [], []
        for layout in self._layouts:
            try:
                layers += [self._layer_in(layout, prefix, tensors)] if layout.body in tensors else []
            except InvalidWeights as error:
                errors.append(error)
        if not layers:
            raise errors[0]
        layers.sort(key=lambda layer: -len(layer.headers))  # a layout with zero points has precedence
        if len(layers) > 1 and len(layers[0].headers) == len(layers[1].headers):
            why = "shapes and dtypes of its tensors do not determine its group of modules"
            raise InvalidWeights(f"{prefix} in {self.location} may be any of several config_groups: {why}")
        return layers[0]

    def _layer_in(self, layout: Layout, prefix: str, tensors: dict[str, TensorHeader]) -> Layer:
        """A layer in one layout; raises InvalidWeights for a tensor that is missing or has another header."""
        body, group = tensors[layout.body], layout.scheme.group
        if len(body.shape) != 2:
            raise InvalidWeights(
                f"{body.name} in {self.location} is {body.dtype} {body.shape}: it must have two dimensions"
            )
        shape = layout.shape(body.shape)
        if group is not None and shape[1] % group:
            why = f"they must be whole groups of {group}, the group_size of the quantization_config"
            raise InvalidWeights(f"{prefix} in {self.location} has {shape[1]} inputs: {why}")
        headers = {}
        for suffix, part in layout.parts(*shape).items():
            header = tensors.get(suffix)
            if header is None:
                if part.needed:
                    raise InvalidWeights(f"{prefix}.{suffix} is missing in {self.location}, beside {body.name}")
                continue
            if tuple(header.shape) not in part.allowed.get(header.dtype, ()):
                allowed = " or ".join(f"{dtype} {list(s)}" for dtype, shapes in part.allowed.items() for s in shapes)
                why = f"beside {body.name} {body.shape}, and by the quantization_config, it must be {allowed}"
                raise InvalidWeights(f"{header.name} in {self.location} is {header.dtype} {header.shape}: {why}")
            headers[suffix] = header
        return Layer(prefix, layout, shape, headers)


def _stored_bytes(header: TensorHeader) -> int:
    bits = int(re.sub(r"\D.*", "", header.dtype.lstrip("BFIUOL")) or 8)  # of U8, I32, BF16, F8_E4M3, BOOL
    return math.prod(header.shape) * bits // 8
