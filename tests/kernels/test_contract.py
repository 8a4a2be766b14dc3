"""Every implementation keeps the contract of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from nanoengine.kernels.native.operations import NativeKernels
from nanoengine.kernels.native.support import unsupported_reason
from nanoengine.kernels.reference.operations import TorchKernels
from nanoengine.kernels.triton.launch import unsupported_reason as triton_unsupported_reason
from tests.kernels.contract import (
    OF_NATIVE_KERNELS,
    OPERATIONS,
    Case,
    Kind,
    Operation,
    check_operation,
    dequantized,
    id_of,
)
from tests.kernels.formulas import DEVICE
from tests.kernels.quantized_matrices import GROUPS

ALL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SEEDS = {"torch": 12, "native": 40, "triton": 12}
FEW = (1, 2, 5, 7, 8, 8, 9, 16, 17, 33, 64)
"""Rows around those that Triton kernels multiply by themselves."""


@cache
def kind_of(name: str) -> Kind:
    """A test is skipped with the reason that one cannot run here."""
    if name == "torch":
        return Kind([TorchKernels()], (60, 200, 40), looser=4)
    reason = (
        unsupported_reason(torch.device("cpu"), torch.float32)
        if name == "native"
        else triton_unsupported_reason(DEVICE)
    )
    if reason is not None:
        pytest.skip(f"no {name} kernels: {reason}")
    if name == "native":
        ways = ("int8", "int8", "int16", "bfloat16", "float32")
        return Kind([NativeKernels(activation_dtype=name) for name in ways])
    from nanoengine.kernels.triton.operations import TritonKernels

    return Kind([TritonKernels()], (70, 300, 40), ALL_DTYPES, GROUPS, 4, DEVICE, FEW)


@pytest.mark.parametrize("make", OF_NATIVE_KERNELS, ids=id_of)
def test_native(make: Callable[[Case], Operation]) -> None:
    check_operation(make, kind_of("native"), range(SEEDS["native"]))


def test_native_products_of_dequantized_weights() -> None:
    kind = kind_of("native")  # or skip
    ways = [NativeKernels(activation_dtype=name) for name in ("bfloat16", "float32")]
    check_operation(dequantized, replace(kind, kernels=ways), range(60))


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("make", OPERATIONS, ids=id_of)
def test_torch_and_triton(make: Callable[[Case], Operation], name: str) -> None:
    check_operation(make, kind_of(name), range(SEEDS[name]))
