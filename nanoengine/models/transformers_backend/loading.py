"""Loading of weights: transformers builds and names the modules, this engine reads the files and owns the matrices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanoengine.errors import InvalidWeights
from nanoengine.models.checkpoint import TensorHeader
from nanoengine.models.implementation import Weights
from nanoengine.models.layers.factory import Factory
from nanoengine.models.loader import Quantizer
from nanoengine.models.safetensors_folder import SafetensorsFolder
from nanoengine.models.transformers_backend.modules import (
    EngineEmbedding,
    EngineExperts,
    EngineLinear,
    EngineNorm,
    LinearGroup,
    Shell,
)
from nanoengine.models.transformers_backend.probe import Replacements, is_turned, linear_shape


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file that is read when transformers slices it."""

    header: TensorHeader
    read: Callable[[TensorHeader], Tensor]

    def __getitem__(self, part: Any) -> Tensor:
        return self.read(self.header)[part]


def load(
    kind: Any, config: Any, replacements: Replacements, weights: Weights, factory: Factory
) -> tuple[Any, list[LinearGroup]]:
    """A model of a class of transformers with the weights of a checkpoint, its products, norms and experts replaced.

    Returns:
        The model, and the groups of its linear layers in the order in which they are called.

    Raises:
        InvalidWeights: tensors that are missing or misshapen, or another error of transformers.
    """
    groups: list[LinearGroup] = []
    checkpoint, quantize, use_tqdm = weights
    assert isinstance(checkpoint, SafetensorsFolder)  # others were refused

    def build(self: Any, config: Any, *more: Any, **options: Any) -> None:
        kind.__init__(self, config, *more, **options)
        groups.extend(_replace(self, replacements, factory, quantize))

    # transformers knows by its name which tensors of a class have which other names in files.
    replaced: Any = type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})
    with checkpoint.reader() as read, _one_tensor_at_a_time(shown=use_tqdm):
        headers = (header for header in checkpoint.headers() if not header.adds_nothing)
        stored = {header.name: StoredTensor(header, read) for header in headers}
        model, report = replaced.from_pretrained(
            None,
            config=config,
            state_dict=stored,
            dtype=factory.dtype,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    for wrong, keys in (("lack", report["missing_keys"]), ("have other sizes in", report["mismatched_keys"])):
        if keys:
            raise InvalidWeights(
                f"the weights in {checkpoint.location} {wrong} {len(keys)} tensors of {kind.__name__}: {sorted(keys)[:5]}"
            )
    for group in groups:
        group.finish()
    model.eval().requires_grad_(False)
    for module in model.modules():
        if hasattr(module, "_apply_gate"):  # experts of transformers, where "batched_mm" copies weights for every token
            module.config._experts_implementation = "grouped_mm"
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, Shell):
            tensor.device = factory.device
        else:
            tensor.data = tensor.data.to(factory.device, copy=True)  # it may be mapped from a file
    return model, groups


def _replace(
    model: Any, replacements: Replacements, factory: Factory, quantize: Quantizer | None
) -> Iterator[LinearGroup]:
    modules, head = dict(model.named_modules()), model.get_output_embeddings()
    replaced: dict[str, nn.Module] = {}
    for names in replacements.linear_groups:
        members = [modules[name] for name in names]
        sizes, (inputs, *_) = zip(*map(linear_shape, members), strict=True)
        group = LinearGroup(factory, quantize, inputs, sizes, torch.float32 if members[0] is head else None)
        for name, member in zip(names, members, strict=True):
            replaced[name] = EngineLinear(member, group, is_turned=is_turned(member))
        yield group
    for name in replacements.embeddings:
        replaced[name] = EngineEmbedding(modules[name], factory, quantize)
    for name, (eps, offset) in replacements.norms.items():
        replaced[name] = EngineNorm(modules[name], factory, eps, offset)
    for name, activation in replacements.experts.items():
        replaced[name] = EngineExperts(modules[name], factory, quantize, activation)
    for name, module in replaced.items():
        model.set_submodule(name, module)


@contextmanager
def _one_tensor_at_a_time(*, shown: bool) -> Iterator[None]:
    """Turn off the threads with which transformers reads files ahead; `shown`: show its progress bar."""
    from transformers.utils import logging

    name, was_shown = "HF_DEACTIVATE_ASYNC_LOAD", logging.is_progress_bar_enabled()
    before = os.environ.get(name)
    os.environ[name] = "1"
    if not shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})
        if was_shown:
            logging.enable_progress_bar()
