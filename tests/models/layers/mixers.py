"""A layer with states beside the module of transformers that it computes as."""

from __future__ import annotations

from typing import Any

import torch

from nanoengine.kernels.recurrences import StateRuns
from nanoengine.kernels.reference.operations import TorchKernels
from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.mixer import Mixer

TOKENS = 11


def factory() -> Factory:
    return Factory(TorchKernels(), torch.float32, torch.device("cpu"))


def check_against(layer: Mixer, module: Any) -> None:
    """With its weights, the layer says what the module says; two runs one behind the other are one."""
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.5)
    slots = layer.slots("it")
    tensors = {f"it.{name}": tensor for name, tensor in module.state_dict().items()}
    assert {name: tuple(slot.shape) for name, slot in slots.items()} == {
        name: tuple(own.shape) for name, own in tensors.items()
    }
    for name, slot in slots.items():
        slot.copy_(tensors[name])
    x = torch.randn(TOKENS, layer.in_proj.weight.shape[1])
    with torch.no_grad():
        right = module(x[None])
    states = [torch.full((3, *shape), float("nan")) for shape in layer.facts.shapes]
    for state in states:
        state[1] = 0
    out = []
    for first, last in ((0, 4), (4, TOKENS)):
        runs = StateRuns(torch.tensor([1], dtype=torch.int32), torch.tensor([0, last - first], dtype=torch.int32))
        out.append(layer.out_proj(layer.mix(layer.in_proj(x[first:last]), (states[0], states[1]), runs)))
    torch.testing.assert_close(torch.cat(out), right[0] if right.dim() == 3 else right, rtol=1e-4, atol=1e-5)
