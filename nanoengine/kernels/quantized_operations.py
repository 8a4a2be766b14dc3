"""The native kernels of quantized weights as functions of tensors; `native_operations.py` makes torch operations of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from nanoengine.kernels.addresses import DTYPES, address, address_of_floats


def quantized_operations(c: SimpleNamespace) -> dict[Callable[..., Tensor | None], tuple[str, ...]]:
    """Every operation, and which of its arguments it overwrites. Tables are those of `NativeWeight`.

    Args:
        c: those of `c_functions`.
    """

    def quantized_linear(
        x: Tensor,
        residual: Tensor | None,
        norm: Tensor | None,
        eps: float,
        table: Tensor,
        bias: Tensor | None,
        outputs: int,
        to_float: bool,
        exact: bool,
    ) -> Tensor:
        x = x.contiguous()
        rows, inputs = x.shape
        out = torch.empty(rows, outputs, dtype=torch.float32 if to_float else x.dtype)
        inputs_at = x.data_ptr(), address(residual), address_of_floats(norm), eps
        outputs_at = table.data_ptr(), len(table), address(bias), out.data_ptr()
        c.quantized_linear(DTYPES[x.dtype], DTYPES[out.dtype], exact, *inputs_at, *outputs_at, rows, outputs, inputs)
        return out

    def quantized_gated_linear(
        x: Tensor,
        residual: Tensor | None,
        norm: Tensor | None,
        eps: float,
        table: Tensor,
        size: int,
        activation: int,
        exact: bool,
    ) -> Tensor:
        x = x.contiguous()
        rows, inputs = x.shape
        out = torch.empty(rows, size, dtype=x.dtype)
        inputs_at = x.data_ptr(), address(residual), address_of_floats(norm), eps
        outputs_at = table.data_ptr(), len(table), out.data_ptr()
        c.quantized_gated_linear(DTYPES[x.dtype], exact, activation, *inputs_at, *outputs_at, rows, size, inputs)
        return out

    def quantized_experts(
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        chosen: Tensor,
        factors: Tensor,
        experts: int,
        size: int,
        activation: int,
        exact: bool,
    ) -> Tensor:
        x, chosen, factors = x.contiguous(), chosen.contiguous(), factors.contiguous()
        out = torch.empty_like(x)
        tables = gate.data_ptr(), up.data_ptr(), down.data_ptr()
        biases = (address_of_floats(bias) for bias in (gate_bias, up_bias, down_bias))
        choices = chosen.data_ptr(), address_of_floats(factors)
        sizes = *chosen.shape, experts, size, x.shape[1]
        of_x = DTYPES[x.dtype], exact, activation, x.data_ptr()
        c.quantized_experts(*of_x, *tables, *biases, *choices, out.data_ptr(), *sizes)
        return out

    def quantized_embed(token_ids: Tensor, table: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
        token_ids = token_ids.contiguous()
        out = torch.empty(len(token_ids), inputs, dtype=dtype)
        rows = token_ids.data_ptr(), table.data_ptr(), len(table), out.data_ptr()
        c.quantized_embed(DTYPES[dtype], *rows, len(token_ids), inputs)
        return out

    return {
        **dict.fromkeys((quantized_linear, quantized_gated_linear), ("residual",)),
        **dict.fromkeys((quantized_experts, quantized_embed), ()),
    }
