"""Probe: one forward pass of a model on the device "meta", without numbers and without memory for weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoengine.errors import UnsupportedModel
from nanoengine.kernels.reference.gates import ACTIVATIONS, gated
from nanoengine.models.transformers_backend.halves import Halves
from nanoengine.models.transformers_backend.interface import (
    COMPUTES_ITSELF,
    PROBE,
    AttentionCall,
    recorded_call,
    values_alone,
)
from nanoengine.models.transformers_backend.module_calls import ModuleCall, recorded

MAX_CALLS = 4096
"""Limit of the calls of attention in one pass, as of the layers of a model."""


@dataclass(frozen=True)
class Replacements:
    """Names of the modules to replace, in the order of their calls."""

    linear_groups: Sequence[Sequence[str]]  # consecutive linear layers of one input
    embeddings: Sequence[str]
    norms: Mapping[str, tuple[float, float]]  # epsilon and offset
    experts: Mapping[str, str]  # activation


@dataclass(frozen=True)
class Probe:
    """The results of one pass of a model."""

    calls: Sequence[AttentionCall]
    hidden_size: int
    vocab_size: int
    replacements: Replacements
    linears: Sequence[tuple[str, int, int]]  # name, outputs and inputs of linear layers but the head


def attention_calls(halves: Halves, ids: Tensor, positions: Tensor | None) -> tuple[list[AttentionCall], Tensor]:
    """The calls of attention in a pass of these tokens, and hidden states where each token attends to itself only."""
    calls: list[AttentionCall] = []

    def compute(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *more: Any) -> Tensor:
        calls.append(recorded_call(module, query, key, value, *more))
        if len(calls) > MAX_CALLS:
            raise UnsupportedModel(f"{halves.name} calls attention more than {MAX_CALLS} times in a pass")
        return values_alone(query, value)

    halves.attention.compute = compute
    halves.attention.use(PROBE)
    with torch.no_grad(), _one_sequence():
        hidden = halves.layers(ids, positions)
    if not calls:
        raise UnsupportedModel(f"{halves.name} {COMPUTES_ITSELF}")
    return calls, hidden


@contextmanager
def _one_sequence() -> Iterator[None]:
    """Turn off the detection of packed sequences, which positions of a probe would trigger."""
    from transformers import masking_utils

    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda _: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search


def probe(model: Any, device: str = "meta") -> Probe:
    """Run a model with any weights.

    Raises:
        UnsupportedModel: an operation that is not computed.
    """
    halves = Halves(model)
    ids, positions = (torch.zeros(3, dtype=torch.int64, device=device) for _ in range(2))
    with recorded(model) as called, torch.no_grad():
        calls, hidden = attention_calls(halves, ids, positions)
        logits = halves.head(hidden)
    replacements, head = _replacements(model, called), model.get_output_embeddings()
    named = ((name, model.get_submodule(name)) for name in chain.from_iterable(replacements.linear_groups))
    linears = [(name, *linear_shape(linear)) for name, linear in named if linear is not head]
    return Probe(calls, hidden.shape[-1], logits.shape[-1], replacements, linears)


def _replacements(model: Any, called: Sequence[ModuleCall]) -> Replacements:
    names = {module: name for name, module in model.named_modules()}
    table = model.get_input_embeddings()
    groups: list[list[str]] = []
    embeddings, norms, experts = [], {}, {}
    last: tuple[Any, bool] = None, False
    for call in called:
        module, first_input = call.module, call.inputs[0] if call.inputs else None
        name = names.pop(module, None)  # a repeated call has no name
        if is_linear(module):
            has_bias = module.bias is not None
            if name is not None and first_input is not None and first_input is last[0] and has_bias == last[1]:
                groups[-1].append(name)
            elif name is not None:
                groups.append([name])
            last = first_input, has_bias
        elif name is None:
            continue
        elif type(module) is nn.Embedding and module is table:
            embeddings.append(name)
        elif (norm := _as_norm(module)) is not None:
            norms[name] = norm
        elif (activation := _as_experts(module)) is not None:
            experts[name] = activation
    return Replacements(groups, embeddings, norms, experts)


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_turned(module)


def linear_shape(module: Any) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer."""
    rows, columns = module.weight.shape
    return (columns, rows) if is_turned(module) else (rows, columns)


def is_turned(module: nn.Module) -> bool:
    """Whether it is a linear layer whose weight is [inputs, outputs]."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D


def _as_norm(module: nn.Module) -> tuple[float, float] | None:
    """Epsilon and offset of a module that computes an RMSNorm with weights, by a trial; None for another module."""
    parameters = list(module.parameters())
    if len(parameters) != 1 or parameters[0].dim() != 1 or len([*module.modules(), *module.buffers()]) != 1:
        return None
    trial = copy.deepcopy(module).to_empty(device="cpu").float()
    (weight,), size = trial.parameters(), len(parameters[0])
    x, small = _drawn(3, size), torch.full((1, size), 1e-6, dtype=torch.float32, device="cpu")
    with torch.device("cpu"), torch.no_grad():
        weight.copy_(_drawn(size).abs() + 0.5)
        try:
            output, of_small = trial(x), trial(small)
        except Exception:  # a module with one vector and other inputs
            return None
        if not isinstance(output, Tensor) or output.shape != x.shape:
            return None
        for offset in (0.0, 1.0):
            scale = weight + offset
            eps = float(f"{((small * scale / of_small) ** 2 - small**2).mean().item():.3g}")
            if eps > 0 and torch.allclose(F.rms_norm(x, (size,), scale, eps), output, rtol=1e-5, atol=1e-6):
                return eps, offset
    return None


def _as_experts(module: Any) -> str | None:
    """The activation of experts that are gated MLPs, without biases, in two tensors; None for any other module."""
    names, facts = {name for name, _ in module.named_parameters()}, ("has_gate", "has_bias", "has_post_expert_norm")
    is_plain = [getattr(module, fact, False) for fact in facts] == [True, False, False]
    if names != {"gate_up_proj", "down_proj"} or module.gate_up_proj.dim() != 3 or not is_plain:
        return None
    both = _drawn(3, 16) * 3
    theirs = module._apply_gate(both if module.is_concatenated else both.unflatten(-1, (2, 8)).mT.flatten(1))
    matching = (kind for kind in ACTIVATIONS if torch.allclose(gated(both, kind), theirs, rtol=1e-5, atol=1e-5))
    return next(matching, None)


def _drawn(*shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
