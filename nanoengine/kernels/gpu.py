"""The operations of layers on an NVIDIA GPU: products by cuBLAS, the rest by Triton kernels, and the steps around the model that
the device does by itself, so that the host need not wait for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.kernels.interface import PlacedTokens, Weight
from nanoengine.kernels.reference import RowMajor
from nanoengine.kernels.triton.activation import silu_and_multiply
from nanoengine.kernels.triton.norm import add_rms_norm, rms_norm
from nanoengine.kernels.triton.place_tokens import place_tokens
from nanoengine.kernels.triton.sampling import choose_tokens


class TritonKernels:
    """Nothing here waits for the device, so that all of it can be captured in a CUDA graph."""

    name = "triton"
    description = "Triton kernels and cuBLAS"
    capturable = True

    def new_weight(self, outputs: int, inputs: int) -> RowMajor:
        return RowMajor(outputs, inputs)

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

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def gated_linear(self, x: Tensor, weight: Weight) -> Tensor:
        return silu_and_multiply(self.linear(x, weight, None))

    def place_tokens(
        self,
        token_ids: Tensor,
        rows: Tensor,
        query_start_loc: Tensor,
        num_computed: Tensor,
        last_tokens: Tensor,
        tables: Tensor,
        block_size: int,
        max_query_len: int,
    ) -> PlacedTokens:
        numbers = rows, query_start_loc, num_computed, last_tokens, tables
        return PlacedTokens(*place_tokens(token_ids, *numbers, block_size, max_query_len))

    def choose_tokens(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        rows: Tensor,
        positions: Tensor,
    ) -> Tensor:
        return choose_tokens(logits, temperature, top_k, top_p, min_p, seeds, rows, positions)
