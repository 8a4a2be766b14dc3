"""GGUFCheckpoint: a GGUF file with Hugging Face's config, names and tensors."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import torch
import xxhash
from torch import Tensor

from nanoengine.errors import InvalidWeights
from nanoengine.kernels.native.support import unsupported_reason
from nanoengine.kernels.native.weights import BLOCKS, dequantized
from nanoengine.kernels.quantized.ggml_blocks import GGMLBlocks
from nanoengine.kernels.quantized.ggml_numbers import FLOATS, dequantize
from nanoengine.kernels.quantized.nvfp4 import NVFP4
from nanoengine.models.checkpoint import TensorHeader
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.gguf.header import TensorRecord
from nanoengine.models.gguf.tensor_names import OF_CONFIG, HFTensor, hf_tensor
from nanoengine.models.gguf.translate import hf_config
from nanoengine.models.safetensors_folder import LEFT_OUT, release_mapped

logger = logging.getLogger("nanoengine")


class GGUFCheckpoint:
    """A `Checkpoint`: the tensors of a GGUF file.

    Raises:
        UnsupportedModel, InvalidWeights: as `hf_config`.
    """

    def __init__(self, file: GGUFFile):
        self._file, self.location = file, str(file.path)
        self.config = hf_config(file)

    def headers(self) -> Iterator[TensorHeader]:
        """The headers; the dtype is F32, F16 or BF16: of quantized tensors, F32."""
        for record, tensor in self._all():
            dtype = record.type if record.type in FLOATS else "F32"
            shape = _shape(record, tensor)
            stored = int(BLOCKS[record.type].weight_bits / 8 * math.prod(shape)) if record.type in BLOCKS else None
            if tensor.change is not None:
                shape = tensor.change.shape(shape)
            yield TensorHeader(tensor.name, dtype, shape, self.location, stored)

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | GGMLBlocks | NVFP4]]:
        """Name and numbers of each tensor, or the blocks of a quantized matrix. Nearly all are views of the mapped file, whose
        memory is released at the next step of the iterator.

        Raises:
            InvalidWeights: rows that the heads do not divide; a scale beside a tensor that is no matrix.
        """
        fast = dequantized if unsupported_reason(torch.device("cpu"), dtype) is None else None
        for record, tensor in self._all():
            data = mapped = torch.from_numpy(self._file.data(record.name))
            if tensor.expert is not None:
                data = data.view(record.shape[0], -1)[tensor.expert]
            if tensor.half is not None:
                data = data.view(2, -1)[tensor.half]
            if tensor.paired_heads:
                data = self._unpaired(data, record, tensor.paired_heads)
            shape = _shape(record, tensor)
            if record.type not in FLOATS and len(shape) == 2 and tensor.change is None:
                blocks = GGMLBlocks(data.view(shape[0], -1), record.type, fast)
                scale = self._scale(record, tensor)
                yield tensor.name, blocks if scale is None else NVFP4.of_blocks(blocks.data, blocks.shape, scale)
            else:
                if self._scale(record, tensor) is not None:
                    raise InvalidWeights(
                        f"{record.name} in {self.location} has a scale beside it, which is read of matrices alone"
                    )
                # Norms are float32 in the model, too.
                numbers = dequantize(data, record.type, shape, None if record.type in FLOATS else dtype)
                yield tensor.name, numbers if tensor.change is None else tensor.change.numbers(numbers)
            release_mapped(mapped)
        left_out = [name for name in self._file.tensors if name not in OF_CONFIG and not hf_tensor(name, self.config)]
        if left_out:
            logger.warning(LEFT_OUT, self.location, len(left_out), left_out[0])

    def fingerprint(self) -> str:
        """A hash of all bytes of the file, or of its parts, at the speed of reading them."""
        digest = xxhash.xxh3_128()
        for content in self._file.parts:
            digest.update(content)
        return digest.hexdigest()

    def _all(self) -> Iterator[tuple[TensorRecord, HFTensor]]:
        for record in self._file.tensors.values():
            for tensor in hf_tensor(record.name, self.config):
                if not self._is_nvfp4_scale(record.name):
                    yield record, tensor

    def _is_nvfp4_scale(self, name: str) -> bool:
        """Whether a tensor is a scale of a matrix in NVFP4. The scale of inputs is not used: they are not rounded to 4 bits."""
        matrix, _, kind = name.rpartition(".")
        weight = self._file.tensors.get(f"{matrix}.weight") if kind in ("scale", "input_scale") else None
        return weight is not None and weight.type == "NVFP4"

    def _scale(self, record: TensorRecord, tensor: HFTensor) -> float | None:
        """The factor of a matrix in NVFP4, if the file has one: of all numbers, or of those of each expert."""
        stored = self._file.tensors.get(f"{record.name.removesuffix('weight')}scale")
        if record.type != "NVFP4" or stored is None:
            return None
        count = 1 if tensor.expert is None else record.shape[0]
        if stored.type != "F32" or math.prod(stored.shape) != count:
            what = f"{stored.name} in {self.location} is {stored.type} {list(stored.shape)}"
            raise InvalidWeights(f"{what}: it must be F32 [{count}]")
        values = torch.from_numpy(self._file.data(stored.name)).view(torch.float32)
        return float(values[tensor.expert or 0])

    def _unpaired(self, data: Tensor, record: TensorRecord, heads: int) -> Tensor:
        """The bytes of the rows, with those of each head in Hugging Face's order; rows of all formats are whole bytes."""
        rows = record.shape[0]
        if rows % (2 * heads):
            raise InvalidWeights(f"{self.location} has {rows} rows in {record.name}, no even number for {heads} heads")
        return data.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).flatten()


def _shape(record: TensorRecord, tensor: HFTensor) -> list[int]:
    rows, *more = record.shape if tensor.expert is None else record.shape[1:]
    return [rows if tensor.half is None else rows // 2, *more]
