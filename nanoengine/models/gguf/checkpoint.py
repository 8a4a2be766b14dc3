"""A GGUF file as a checkpoint: Hugging Face's config, names and tensors."""

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
    """A `Checkpoint` of the tensors in a GGUF file.

    Raises:
        UnsupportedModel, InvalidWeights: as `hf_config`.
    """

    def __init__(self, file: GGUFFile):
        self._file, self.place = file, str(file.path)
        self.config = hf_config(file)

    def headers(self) -> Iterator[TensorHeader]:
        """The dtype is F32, F16 or BF16: numbers of quantized tensors are float32."""
        for record, tensor in self._all():
            dtype = record.type if record.type in FLOATS else "F32"
            shape = _shape(record, tensor)
            stored = int(BLOCKS[record.type].weight_bits / 8 * math.prod(shape)) if record.type in BLOCKS else None
            if tensor.change is not None:
                shape = tensor.change.shape(shape)
            yield TensorHeader(tensor.name, dtype, shape, self.place, stored)

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | GGMLBlocks | NVFP4]]:
        """Name and numbers of each tensor, or the blocks of a quantized matrix; nearly all lie in the mapped file, and are
        unmapped when the next is asked for.

        Raises:
            InvalidWeights: rows that are not those of the heads.
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
                        f"{record.name} in {self.place} has a scale of its own, which is read of matrices alone"
                    )
                # What is stored as it is stays so: norms are float32 in the model, too.
                numbers = dequantize(data, record.type, shape, None if record.type in FLOATS else dtype)
                yield tensor.name, numbers if tensor.change is None else tensor.change.numbers(numbers)
            release_mapped(mapped)
        left_out = [name for name in self._file.tensors if name not in OF_CONFIG and not hf_tensor(name, self.config)]
        if left_out:
            logger.warning(LEFT_OUT, self.place, len(left_out), left_out[0])

    def fingerprint(self) -> str:
        """A hash of all bytes of the file, or of its parts, at the speed of reading them."""
        digest = xxhash.xxh3_128()
        for content in self._file.parts:
            digest.update(content)
        return digest.hexdigest()

    def _all(self) -> Iterator[tuple[TensorRecord, HFTensor]]:
        for record in self._file.tensors.values():
            for tensor in hf_tensor(record.name, self.config):
                if not self._belongs_to_nvfp4(record.name):
                    yield record, tensor

    def _belongs_to_nvfp4(self, name: str) -> bool:
        """Whether it is a scale beside a matrix in NVFP4; that of inputs is not used, as they are not rounded to 4 bits."""
        matrix, _, kind = name.rpartition(".")
        found = self._file.tensors.get(f"{matrix}.weight") if kind in ("scale", "input_scale") else None
        return found is not None and found.type == "NVFP4"

    def _scale(self, record: TensorRecord, tensor: HFTensor) -> float | None:
        """What all numbers of a matrix in NVFP4 are multiplied by, if the file says it: one for all, or one for each expert."""
        stored = self._file.tensors.get(f"{record.name.removesuffix('weight')}scale")
        if record.type != "NVFP4" or stored is None:
            return None
        count = 1 if tensor.expert is None else record.shape[0]
        if stored.type != "F32" or math.prod(stored.shape) != count:
            what = f"{stored.name} in {self.place} is {stored.type} {list(stored.shape)}"
            raise InvalidWeights(f"{what}: it must be F32 [{count}]")
        values = torch.from_numpy(self._file.data(stored.name)).view(torch.float32)
        return float(values[tensor.expert or 0])

    def _unpaired(self, data: Tensor, record: TensorRecord, heads: int) -> Tensor:
        """The bytes with the rows of each head in Hugging Face's order; a row of any format is a whole number of bytes."""
        rows = record.shape[0]
        if rows % (2 * heads):
            raise InvalidWeights(f"{self.place} has {rows} rows in {record.name}, no even number for {heads} heads")
        return data.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).flatten()


def _shape(record: TensorRecord, tensor: HFTensor) -> list[int]:
    rows, *more = record.shape if tensor.expert is None else record.shape[1:]
    return [rows if tensor.half is None else rows // 2, *more]
