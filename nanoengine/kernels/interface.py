"""Kernels: the operations that layers are made of, behind one protocol, and how an implementation is chosen."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nanoengine.errors import InvalidConfig


class Destination(Protocol):
    """Where a tensor of a checkpoint goes: a tensor is one."""

    @property
    def shape(self) -> torch.Size: ...

    def copy_(self, source: Tensor, /) -> object: ...


class Weight(Protocol):
    """A matrix [outputs, inputs] in whatever order its kernels read it."""

    @property
    def shape(self) -> torch.Size: ...

    def rows(self, first: int, count: int) -> Destination:
        """Rows [first, first + count), to be filled from a checkpoint."""
        ...


class Kernels(Protocol):
    """One implementation. Rows are tokens; every result has the dtype of its input unless said otherwise."""

    name: str
    description: str

    def new_weight(self, outputs: int, inputs: int) -> Weight:
        """A matrix with unset rows, of torch's default dtype."""
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x W^T + bias: [num_tokens, inputs] -> [num_tokens, outputs]."""
        ...

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        """hidden W^T in float32: [num_tokens, inputs] -> [num_tokens, outputs]."""
        ...

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        """Rows of a weight: [num_tokens] -> [num_tokens, inputs]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension, computed in float32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual); the residual that is given may be overwritten."""
        ...

    def gated_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """SwiGLU: silu(x G^T) * (x U^T), where the rows of the weight are G and then U: [num_tokens, inputs] -> [num_tokens,
        outputs / 2]."""
        ...

    def draw_tokens(self, logits: Tensor, keys: Tensor) -> Tensor:
        """The highest of logit + Gumbel noise: [num_rows, vocab_size] float32 and [num_rows] keys -> [num_rows] token ids."""
        ...


def choose_kernels(name: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels of that name; for "auto" the native ones if they can run here, and torch's otherwise.

    Raises:
        InvalidConfig: the native kernels were asked for, and cannot run here; the message says why.
    """
    from nanoengine.kernels.native import NativeKernels, why_not
    from nanoengine.kernels.reference import TorchKernels

    if name == "torch":
        return TorchKernels()
    reason = why_not(device, dtype)
    if reason is None:
        return NativeKernels()
    if name == "native":
        raise InvalidConfig(f"kernels is 'native', but they cannot run here: {reason}")
    return TorchKernels(reason)
