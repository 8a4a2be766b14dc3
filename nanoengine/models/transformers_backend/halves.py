"""Halves: the layers and the head of a model, in two calls of its `forward`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from nanoengine.errors import UnsupportedModel
from nanoengine.models.transformers_backend.interface import AttentionInterface


class _LayersDone(Exception):
    """The layers are computed; the argument is their output."""


class Halves:
    """The two halves of a model: `layers` leaves its `forward` after the part with the layers, `head` skips that part.

    Positions are arguments of the model, or of the modules in it that have such an argument (BART and similar models).

    Args:
        model: a decoder of transformers; the `forward` of the part that has its layers is exchanged.

    Raises:
        UnsupportedModel: it has no such part, or no argument for positions.
    """

    first_position = 0
    """The position of the first token as the model counts: 2 in RoBERTa and similar models."""

    def __init__(self, model: Any):
        self.model, self.name, self.attention = model, type(model).__name__, AttentionInterface(model)
        self._hidden: Tensor | None = None
        self._output: Any = None
        self._positions: Tensor | None = None
        part = part_with_layers(model)
        if part is None:
            raise UnsupportedModel(f"{self.name} has no part that is its layers without its head")
        parameters, inner = _parameters(model), _parameters(part)
        passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._takes_positions = "position_ids" in parameters or (passes_on and "position_ids" in inner)
        self._more = {"use_cache": False} if "use_cache" in parameters or passes_on else {}
        if not self._takes_positions and not self._pass_positions(part):
            raise UnsupportedModel(f"{self.name} cannot be told at which positions its tokens stand")
        forward = part.forward

        def half(*args: Any, **kwargs: Any) -> Any:
            if self._hidden is not None:
                return self._output(self._hidden)
            raise _LayersDone(forward(*args, **kwargs))

        part.forward = half

    def _pass_positions(self, part: Any) -> bool:
        """Pass positions to each module in a part that has such an argument; False: there is none."""

        def add_positions(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            counted = kwargs.get("position_ids")  # from 0, in the order of the tokens
            if self._positions is None:
                return None
            return args, kwargs | {"position_ids": self._positions.view(-1 if counted is None else counted.shape)}

        takers = [module for module in part.modules() if module is not part and "position_ids" in _parameters(module)]
        for module in takers:
            module.register_forward_pre_hook(add_positions, with_kwargs=True)
        return bool(takers)

    def layers(self, input_ids: Tensor, positions: Tensor | None) -> Tensor:
        """[num_tokens] ids and positions, counted from 0, or None: as the model counts them -> [num_tokens, hidden_size]."""
        self._positions = None if positions is None else positions + self.first_position
        arguments = (
            {"position_ids": self._positions[None]} if self._takes_positions and self._positions is not None else {}
        )
        try:
            self.model(input_ids=input_ids[None], **arguments, **self._more)
        except _LayersDone as done:
            (output,) = done.args
        else:
            raise UnsupportedModel(f"{self.name} does not compute its layers in the part of it that has them")
        if isinstance(output, tuple):
            self._output = lambda hidden: (hidden,)
            return output[0][0]
        self._output = lambda hidden: type(output)(last_hidden_state=hidden)
        return output.last_hidden_state[0]

    def head(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size], as `layers` returned them -> [n, vocab_size]."""
        self._hidden = hidden[None]
        ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)  # not used
        try:
            output = self.model(input_ids=ids, **({"position_ids": ids} if self._takes_positions else {}), **self._more)
        finally:
            self._hidden = None
        return (output[0] if isinstance(output, tuple) else output.logits)[0]


def part_with_layers(model: Any) -> Any:
    """The part of a model below its head; None if there is none."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    candidates = [decoder, model.base_model, *model.children()]
    parts = (part for part in candidates if part is not None and part is not model)
    return next((part for part in parts if hasattr(part, "base_model_prefix")), None)


def _parameters(module: Any) -> Any:
    return inspect.signature(type(module).forward).parameters
