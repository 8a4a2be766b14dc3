"""The operations of layers on an NVIDIA GPU: products by cuBLAS, or of few rows by kernels of this project, fused with the
operations before and after them; the rest by Triton kernels; and the steps around the model that the device does by itself, so
that the host need not wait for it.
"""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.core.kernels import SamplingTable, Weight
from nanoengine.kernels.attention import WriteInOneGo
from nanoengine.kernels.operations import Around, ExpertWeights, Kernels, Mixture, Norm, Write
from nanoengine.kernels.reference.operations import RowMajor, dense_matrices
from nanoengine.kernels.triton.attention.backend import TritonAttention
from nanoengine.kernels.triton.compute_slot_mapping import compute_slot_mapping
from nanoengine.kernels.triton.draws.repeated import RepeatedDraws
from nanoengine.kernels.triton.draws.sampling import choose_tokens
from nanoengine.kernels.triton.launch import float8_unsupported_reason
from nanoengine.kernels.triton.products.activation import gate_and_multiply, sigmoid_gate
from nanoengine.kernels.triton.products.experts import sum_of_experts
from nanoengine.kernels.triton.products.few_rows import MANY_OUTPUTS, ROWS, most_rows, product_of_few_rows
from nanoengine.kernels.triton.products.float8 import Float8Rows
from nanoengine.kernels.triton.products.fusion import Fusion
from nanoengine.kernels.triton.products.gated_product import FEW, can_gate, gated_product
from nanoengine.kernels.triton.products.gemv import MOST_ROWS as MOST_GEMV_ROWS
from nanoengine.kernels.triton.products.gemv import WIDEST_NORMED, gemv
from nanoengine.kernels.triton.products.heads import can_count_heads, heads_of_product
from nanoengine.kernels.triton.products.mlp import fitting_sizes, mlp_of_one_row
from nanoengine.kernels.triton.products.norm import add_rms_norm, gated_norm, rms_norm
from nanoengine.kernels.triton.products.packed import PackedWeight
from nanoengine.kernels.triton.products.packed_gemv import MOST_ROWS as MOST_PACKED_GEMV_ROWS
from nanoengine.kernels.triton.products.packed_gemv import packed_gemv
from nanoengine.kernels.triton.products.swap_ab import MOST_ROWS as MOST_SWAPPED_ROWS
from nanoengine.kernels.triton.products.swap_ab import swap_ab
from nanoengine.kernels.triton.products.weights import LateWeight
from nanoengine.kernels.triton.recurrence import delta_rule, mamba2
from nanoengine.kernels.triton.short_conv import short_conv
from nanoengine.kernels.triton.tuning import Tuning, load_tuning
from nanoengine.kernels.triton.workspace import Workspace

Content = RowMajor | PackedWeight | Float8Rows


class TritonKernels(Kernels):
    """Nothing here waits for the device, so that all of it can be captured in a CUDA graph.

    Quantized weights stay so: those of whole numbers are dequantized as a product of few rows reads them, and for more rows one
    whole weight at a time, into a temporary tensor; floats of 8 bits are multiplied with rows of x that are rounded to match, if
    the device does that. Experts, and what comes in other formats, are dequantized as they are loaded.

    Args:
        tuning: what to compute by which of our own products; what was chosen for the current GPU if not given.
    """

    name = "triton"
    description = "Triton kernels and cuBLAS"
    fingerprint = str(torch.__version__)
    quantized_products = "whole numbers dequantized as they are read, floats of 8 bits as such"
    capturable = True
    short_conv, delta_rule, mamba2 = staticmethod(short_conv), staticmethod(delta_rule), staticmethod(mamba2)
    gated_norm, sigmoid_gate = staticmethod(gated_norm), staticmethod(sigmoid_gate)
    compute_slot_mapping = staticmethod(compute_slot_mapping)

    def __init__(self, tuning: Tuning | None = None) -> None:
        self.tuning = tuning or load_tuning()
        self._workspace, self._draws = Workspace(), RepeatedDraws()
        self._barriers = Workspace()
        self._newest: LateWeight | None = None

    def _launch(self, rows: Tensor) -> int:
        """Of all that is no product, by the rows of a step."""
        return self.tuning.launch(len(rows))

    def new_weight(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> LateWeight:
        weight = LateWeight(outputs, inputs, dtype, device, has_float8=float8_unsupported_reason(device) is None)
        if self._newest is not None:
            self._newest.next = weight
        self._newest = weight
        return weight

    def product(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, **around: Unpack[Around]
    ) -> tuple[Tensor, Tensor]:
        content = _content(weight)
        fusion = Fusion(bias, **around, launch=self.tuning.launch(len(x), product=True))
        if (fused := self._fused(x, content, fusion)) is not None:
            return fused
        dtype, activation = fusion.dtype, fusion.activation
        if fusion.norm is not None:
            factors, total = self.normed(x, fusion.norm, fusion.residual)
            return self.product(factors, weight, bias, activation=activation, dtype=dtype)[0], total
        if activation is not None:
            return self.gate(self.product(x, weight)[0], activation), x
        if isinstance(content, Float8Rows):
            return content.product(x, bias, dtype or x.dtype), x
        numbers = _numbers(content, x.dtype)
        if dtype is torch.float32 and x.is_cuda and x.dtype in (torch.float16, torch.bfloat16):
            # The sums are float32 anyway: rounding them to half precision would make equals of different logits.
            assert bias is None
            return torch.mm(x, numbers.T, out_dtype=torch.float32), x
        return F.linear(x, numbers, bias).to(dtype or x.dtype), x

    def heads(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        write: Write,
        *,
        norm: Norm | None,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        content, tuning = _content(weight), self.tuning
        if not (self.can_fuse and isinstance(content, RowMajor) and _is_for_gemv(x, len(content.tensor), norm)):
            return super().heads(x, weight, bias, write, norm=norm, residual=residual)
        fusion = Fusion(bias, norm, residual, launch=tuning.launch(len(x), product=True))
        ahead = _of(weight).following(tuning.weights_ahead)
        if tuning.heads_in_product and isinstance(write, WriteInOneGo) and isinstance(write.backend, TritonAttention):
            cache = write.backend.cache(write.kv)
            head_dim = cache.k.shape[3]
            if cache.k_scales is None and can_count_heads(x.shape[1], len(content.tensor), head_dim, x.element_size()):
                args = self._workspace, write.changes, cache, write.slot_mapping
                return heads_of_product(x, content.tensor, fusion, *args, ahead)
        qkv, total = gemv(x, content.tensor, fusion, ahead)
        return write(qkv), total

    def mlp(
        self,
        x: Tensor,
        gate_up: Weight,
        down: Weight,
        activation: str,
        *,
        norm: Norm | None,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        how, (first, second) = self.tuning.fused_mlp, (_content(gate_up), _content(down))
        if how and self.can_fuse and isinstance(first, RowMajor) and isinstance(second, RowMajor):
            (rows, hidden), size = x.shape, second.tensor.shape[1]
            sizes = fitting_sizes(hidden, size, x.element_size(), x.device, how)
            if rows == 1 and sizes is not None and _is_for_gemv(x, size, norm):
                launch = self.tuning.mlp_depends * self.tuning.launch(rows, product=True)
                fusion = Fusion(None, norm, residual, activation, launch=launch)
                return mlp_of_one_row(x, first.tensor, second.tensor, fusion, self._barriers, sizes, how)
        return super().mlp(x, gate_up, down, activation, norm=norm, residual=residual)

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        content = _content(weight)
        if isinstance(content, RowMajor):
            return F.embedding(token_ids, content.tensor)
        return content.dequantize(_of(weight).dtype, token_ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, self._launch(x))

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps, self._launch(x))

    def gate(self, both: Tensor, activation: str) -> Tensor:
        return gate_and_multiply(both, activation, self._launch(both))

    def choose_tokens(
        self, logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor, last_tokens: Tensor | None = None
    ) -> Tensor:
        choose = self._draws.choose if logits.is_cuda else choose_tokens
        return choose(logits, table, rows, positions, last_tokens, self._launch(logits))

    def new_experts(
        self, experts: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> ExpertWeights:
        return ExpertWeights(RowMajor(experts * outputs, inputs, dtype, device), experts)

    def experts(self, x: Tensor, mixture: Mixture, chosen: Tensor, factors: Tensor) -> Tensor:
        gate, up, down = dense_matrices(mixture)
        return sum_of_experts(x, gate, up, down, chosen, factors, mixture.activation, mixture.biases)

    def _fused(self, x: Tensor, content: Content, fusion: Fusion) -> tuple[Tensor, Tensor] | None:
        """What `product_of_few_rows` returns, by the kernel of ours that is made for so many rows.

        None: a norm is better computed by itself, and then the product of that; or, without a norm, the product by cuBLAS, whose
        programs share what they read.
        """
        if isinstance(content, Float8Rows):
            return None
        tuning, rows = self.tuning, len(x)
        norm, activation = fusion.norm, fusion.activation
        if isinstance(content, PackedWeight):
            if rows <= MOST_PACKED_GEMV_ROWS:
                return packed_gemv(x, content, fusion)
            most = most_rows(x.dtype) if norm is None else ROWS
            return product_of_few_rows(x, content, fusion) if rows <= most else None
        weight = content.tensor
        outputs = len(weight) // fusion.sets
        if outputs < MANY_OUTPUTS:  # with more, few_rows.py has so many programs that memory never stands still
            if _is_for_gemv(x, outputs, norm):
                return gemv(x, weight, fusion)
            swapped_rows = max(tuning.swapped_rows, tuning.gated_rows if activation is not None else 0)
            if rows <= min(swapped_rows, MOST_SWAPPED_ROWS) and x.dtype is not torch.float32:
                return None if norm is not None else (swap_ab(x, weight, fusion, self._workspace), x)
            is_inside = tuning.gated_prompts if rows > FEW else ROWS < rows <= tuning.gated_rows
            if activation is not None and norm is None and is_inside and can_gate(x, weight):
                return gated_product(x, weight, activation), x
        return product_of_few_rows(x, weight, fusion) if rows <= ROWS else None


def _is_for_gemv(x: Tensor, outputs: int, norm: Norm | None) -> bool:
    rows, inputs = x.shape
    fits = rows == 1 or norm is None or inputs <= WIDEST_NORMED
    return rows <= MOST_GEMV_ROWS and outputs < MANY_OUTPUTS and fits


def _of(weight: Weight) -> LateWeight:
    assert isinstance(weight, LateWeight)
    return weight


def _content(weight: Weight) -> Content:
    return _of(weight).content


def _numbers(content: RowMajor | PackedWeight, dtype: torch.dtype) -> Tensor:
    """Those of a packed weight are a temporary tensor as large as all of it."""
    return content.tensor if isinstance(content, RowMajor) else content.dequantize(dtype)
