"""Mxfp4Folder: checkpoints whose experts are MXFP4, as OpenAI stores gpt-oss (OCP Microscaling Formats, 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanoengine.errors import InvalidWeights
from nanoengine.kernels.quantized.ggml_blocks import GGMLBlocks
from nanoengine.models.checkpoint import TensorHeader
from nanoengine.models.safetensors_folder import SafetensorsFolder, release_mapped

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the names of a tensor's two parts."""

BLOCK_BYTES, BLOCK_VALUES = 16, 32


@dataclass(frozen=True)
class Mxfp4Experts:
    """[experts, inputs, outputs], stored with outputs before inputs.

    Attributes:
        blocks: [experts, outputs, inputs / 32, 16] uint8; byte i has numbers 2 i, in its lower half, and 2 i + 1.
        scales: [experts, outputs, inputs / 32] uint8: exponents of two, plus 127.
    """

    blocks: Tensor
    scales: Tensor

    def expert(self, number: int) -> GGMLBlocks:
        blocks = self.blocks[number]
        numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
        halves = numbers[..., :BLOCK_BYTES] | numbers[..., BLOCK_BYTES:] << 4  # byte i has numbers i and 16 + i
        return GGMLBlocks(torch.cat((self.scales[number][..., None], halves), -1).flatten(1), "MXFP4")

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return torch.stack([self.expert(number).dequantize(dtype).T for number in range(len(self.blocks))])


class Mxfp4Folder:
    """A `Checkpoint`: each pair of `name_blocks` and `name_scales` is one tensor; others are unchanged."""

    def __init__(self, folder: Path):
        self._folder = SafetensorsFolder(folder)
        self.location = self._folder.location

    def headers(self) -> Iterator[TensorHeader]:
        """The headers; the dtype of MXFP4 is BF16, which represents all its numbers.

        Raises:
            ModelNotFound, InvalidWeights: files that are missing or broken; blocks without scales of their shape.
        """
        for blocks, scales in self._entries():
            if scales is None:
                yield blocks
                continue
            experts, outputs, groups, _ = blocks.shape
            shape, name = [experts, groups * BLOCK_VALUES, outputs], blocks.name.removesuffix(BLOCKS)
            stored = experts * outputs * groups * (BLOCK_BYTES + 2)  # in memory, exponents are bfloat16
            yield TensorHeader(name, "BF16", shape, blocks.file, stored)

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | Mxfp4Experts]]:
        with self._folder.reader() as read:
            for header, scales in self._entries():
                tensor = read(header)
                if scales is None:
                    yield header.name, tensor
                else:
                    yield header.name.removesuffix(BLOCKS), Mxfp4Experts(tensor, read(scales))
                release_mapped(tensor)

    def fingerprint(self) -> str:
        return self._folder.fingerprint()

    def _entries(self) -> Iterator[tuple[TensorHeader, TensorHeader | None]]:
        """All tensors except scales; blocks with their scales."""
        headers = list(self._folder.headers())
        named = {header.name: header for header in headers}
        for header in headers:
            pair = header.name.removesuffix(SCALES) + BLOCKS
            if header.name.endswith(SCALES) and pair in named:
                continue
            if not header.name.endswith(BLOCKS):
                yield header, None
                continue
            name = header.name.removesuffix(BLOCKS) + SCALES
            scales = named.get(name)
            if scales is None:
                raise InvalidWeights(f"{name} is missing in {self.location}, beside {header.name}")
            for part, shape in ((header, [*scales.shape, BLOCK_BYTES]), (scales, header.shape[:-1])):
                if part.dtype != "U8" or list(part.shape) != list(shape) or len(scales.shape) != 3:
                    stated = f"{part.name} in {self.location} is {part.dtype} {part.shape}"
                    raise InvalidWeights(
                        f"{stated}: blocks must be U8 [experts, outputs, groups, 16], scales without the 16"
                    )
            yield header, scales
