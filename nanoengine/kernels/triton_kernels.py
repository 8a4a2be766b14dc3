"""The operations of layers on an NVIDIA GPU: products by cuBLAS, the rest by Triton kernels, and the steps around the model that
the device does by itself, so that the host need not wait for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.kernels.interface import Weight
from nanoengine.kernels.torch_kernels import RowMajor
from nanoengine.kernels.triton.activation import silu_and_multiply
from nanoengine.kernels.triton.norm import add_rms_norm, rms_norm
from nanoengine.kernels.triton.place_tokens import place_tokens
from nanoengine.kernels.triton.sampling import choose_tokens


class TritonKernels:
    """Nothing here waits for the device, so that all of it can be captured in a CUDA graph."""

    name = "triton"
    description = "Triton kernels and cuBLAS"
    capturable = True

    def __init__(self) -> None:
        self.place_tokens, self.choose_tokens = place_tokens, choose_tokens
        self.rms_norm, self.add_rms_norm = rms_norm, add_rms_norm

    def new_weight(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> RowMajor:
        return RowMajor(outputs, inputs, dtype, device)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, RowMajor)
        return F.linear(x, weight.tensor, bias)

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, RowMajor)
        if hidden.is_cuda and hidden.dtype in (torch.float16, torch.bfloat16):
            # The sums are float32 anyway: rounding them to half precision would make equals of different logits.
            return torch.mm(hidden, weight.tensor.T, out_dtype=torch.float32)
        return F.linear(hidden, weight.tensor).float()

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, RowMajor)
        return F.embedding(token_ids, weight.tensor)

    def gated_linear(self, x: Tensor, weight: Weight) -> Tensor:
        return silu_and_multiply(self.linear(x, weight, None))
