"""Loading: compare the tensors of files with the slots of a model, and copy each tensor to its slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nanoengine.core.weights import EMBEDDING, HEAD
from nanoengine.errors import InvalidWeights
from nanoengine.kernels.operations import QuantizedSlot, SlotInParts, WeightSlot
from nanoengine.kernels.quantized.tensor import QuantizedExperts, QuantizedTensor
from nanoengine.kernels.reference.attention import TorchAttention
from nanoengine.kernels.reference.operations import TorchKernels
from nanoengine.models.checkpoint import FLOATS, Checkpoint
from nanoengine.models.decoder import build_model
from nanoengine.models.description import config_table
from nanoengine.models.gguf.checkpoint import GGUFCheckpoint
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.layers.slots import Unused
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.quantization.at_load import BITS
from nanoengine.models.quantization.mxfp4_folder import Mxfp4Folder
from nanoengine.models.quantization.packed_folder import PackedFolder
from nanoengine.models.quantization.scheme import read_scheme
from nanoengine.models.safetensors_folder import SafetensorsFolder
from nanoengine.progress import stage

STACKED = "gate_up_proj", "down_proj"
MAX_PROBLEMS = 1000
"""Limit of the unexpected and repeated tensors in a comparison."""

Quantizer = Callable[[Tensor], QuantizedTensor]


def open_checkpoint(path: Path, gguf: GGUFFile | None = None) -> Checkpoint:
    """The weights of the model at a path from `find_model`; `gguf`: the file there, if it is open.

    Raises:
        ModelNotFound, UnsupportedModel: a folder without a config.json, or with a quantization that is not supported.
    """
    if not path.is_dir():
        return GGUFCheckpoint(gguf or GGUFFile.open(path))
    scheme = read_scheme(config_table(path))
    if scheme is None:
        return SafetensorsFolder(path)
    return Mxfp4Folder(path) if scheme.layout == "mxfp4" else PackedFolder(path, scheme)


def as_stored(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """The model with `are_stacked` and `are_transposed` as in the files: transformers 4 and 5 write different files, and Qwen3.5
    and Qwen3-VL exist in both forms.
    """
    experts, names = config.experts, config.names
    if experts is not None and experts.are_transposed:
        rows, down = [config.hidden_size, experts.intermediate_size], f".{names.experts}.experts.{STACKED[1]}"
        shapes = (header.shape[1:] for header in checkpoint.headers() if header.name.endswith(down))
        is_as_published = rows[0] == rows[1] or list(next(shapes, [])) != rows
        return replace(config, experts=replace(experts, are_transposed=is_as_published))
    if experts is None or experts.are_stacked or len(names.expert_gate_up_down) == 2:
        return config
    first = next((header.name for header in checkpoint.headers() if ".experts." in header.name), "")
    prefix, _, part = first.partition(".experts.")
    if part not in STACKED:
        return config
    names = replace(names, expert_gate_up_down=STACKED, experts=prefix.rpartition(".")[2])
    return replace(config, experts=replace(experts, are_stacked=True), names=names)


def check_weights(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Compare the headers of a checkpoint with a model, before memory is allocated.

    Raises:
        ModelNotFound, InvalidWeights: as `load_weights`.
    """
    _compare(_slots(config), checkpoint)


def num_parameters(config: ModelConfig) -> int:
    """The number of weights of a model."""
    return sum(math.prod(slot.shape) for slot in _slots(config).values() if not isinstance(slot, Unused))


def _slots(config: ModelConfig) -> dict[str, WeightSlot]:
    """The slots of all tensors of a checkpoint, of a model without memory."""
    model = build_model(config, TorchKernels(), TorchAttention(1), torch.float32, torch.device("meta"))
    return model.checkpoint_tensors()


def load_weights(
    tensors: Mapping[str, WeightSlot],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    *,
    quantize: Quantizer | None = None,
    use_tqdm: bool = True,
) -> None:
    """Copy each tensor of a checkpoint to its slot in `tensors`, converted to the dtype of the slot.

    Args:
        tensors: the slots by names of tensors.
        checkpoint: the source.
        dtype: of nearly all slots: formats that must be dequantized are dequantized to it.
        quantize: quantizes dense matrices for slots of quantized rows; None: they stay dense.
        use_tqdm: show a progress bar.

    Raises:
        ModelNotFound: no weights, or a file of them is missing.
        InvalidWeights: a broken file; tensors that are missing, unexpected, repeated or misshapen (the message names
            them, and nothing was copied); a tied model with another head.
    """
    _compare(tensors, checkpoint)
    # A tied model may have a head in its files; then it is compared with the embedding.
    twice = HEAD not in tensors and any(header.name == HEAD for header in checkpoint.headers())
    tied: dict[str, Tensor | QuantizedTensor] = {}
    with stage("Loading weights", len(tensors), "tensor", shown=use_tqdm) as advance:
        for name, source in checkpoint.tensors(dtype):
            if name in tensors:
                try:
                    fill(source, tensors[name], dtype, quantize)
                except InvalidWeights as error:
                    raise InvalidWeights(f"{name} in {checkpoint.location}: {error}") from error
                advance()
            if twice and name in (EMBEDDING, HEAD):
                assert not isinstance(source, QuantizedExperts)
                tied[name] = source
    if twice and not torch.equal(*(_numbers(tied[name], torch.float32) for name in (HEAD, EMBEDDING))):
        raise InvalidWeights(
            f"the weights in {checkpoint.location} have an lm_head.weight that is not the embedding, but tie_word_embeddings is "
            "true: correct one of the two"
        )


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype, quantization: str | None = None) -> int:
    """Approximate bytes of the weights of a checkpoint in memory: quantized tensors stay so, others have `dtype`."""
    total = 0.0
    for header in checkpoint.headers():
        count = math.prod(header.shape)
        if header.stored_bytes is not None:
            total += header.stored_bytes
        elif quantization is not None and len(header.shape) >= 2:
            total += count * BITS[quantization] / 8
        else:
            total += count * dtype.itemsize
    return int(total)


def fill(
    source: Tensor | QuantizedTensor | QuantizedExperts,
    slot: WeightSlot,
    dtype: torch.dtype,
    quantize: Quantizer | None,
) -> None:
    """Copy a tensor to its slot, quantized by `quantize` if the slot supports it."""
    if isinstance(slot, SlotInParts):
        for part, slot_of_part in slot.parts(source):
            fill(part, slot_of_part, dtype, quantize)
        return
    assert not isinstance(source, QuantizedExperts)  # their slots have parts
    if isinstance(slot, QuantizedSlot):
        if isinstance(source, Tensor) and source.dim() == 2 and quantize is not None:
            source = quantize(source)
        if not isinstance(source, Tensor):
            slot.copy_quantized(source)
            return
    slot.copy_(_numbers(source, dtype))


def _numbers(source: Tensor | QuantizedTensor, dtype: torch.dtype) -> Tensor:
    return source if isinstance(source, Tensor) else source.dequantize(dtype)


def _compare(slots: Mapping[str, WeightSlot], checkpoint: Checkpoint) -> None:
    """Raises InvalidWeights unless the files have exactly these tensors, each once, of a float dtype; a tied head is optional."""
    missing = dict.fromkeys(slots)
    unexpected: list[str] = []
    repeated: list[str] = []
    misshapen: list[str] = []
    for header in checkpoint.headers():
        name = header.name
        slot = slots.get(EMBEDDING if name == HEAD and HEAD not in slots else name)
        if slot is None:
            if not header.adds_nothing:
                unexpected.append(name)
        elif name in slots and name not in missing:
            repeated.append(f"{name} in {header.file}")
        elif tuple(header.shape) != tuple(slot.shape) or header.dtype not in FLOATS:
            misshapen.append(f"{name} is {header.dtype} {header.shape}, not a float {list(slot.shape)}")
        missing.pop(name, None)
        if len(unexpected) + len(repeated) > MAX_PROBLEMS:
            break
    needed = [name for name in missing if not isinstance(slots[name], Unused)]
    problems = {"missing": needed, "unexpected": unexpected, "repeated": repeated, "misshapen": misshapen}
    lines = [f"{kind} ({len(names)}): {_some(names)}" for kind, names in problems.items() if names]
    if lines:
        raise InvalidWeights(
            f"the weights in {checkpoint.location} do not match the config beside them: " + "; ".join(lines)
        )


def _some(names: list[str]) -> str:
    return ", ".join(name[:500] for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
