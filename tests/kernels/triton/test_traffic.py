"""Bytes that each kernel moves, beside those that it must: what it is given once, and what it returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

if torch.cuda.is_available():
    pytest.skip("bytes are counted in the interpreter, which is off where there is a GPU", allow_module_level=True)

from nanoengine.kernels.triton.attention.rotate_and_write import rotate_and_write, write_kv
from nanoengine.kernels.triton.products import few_rows
from nanoengine.kernels.triton.products.activation import gate_and_multiply
from nanoengine.kernels.triton.products.norm import add_rms_norm, rms_norm


@dataclass
class Traffic:
    loaded: int = 0
    stored: int = 0

    @property
    def total(self) -> int:
        return self.loaded + self.stored


@contextmanager
def counting() -> Iterator[Traffic]:
    """What kernels move from here on; masked places are not moved."""
    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def num_bytes(places: Any, mask: Any) -> int:
        return int(mask.data.sum()) * (places.get_element_ty().primitive_bitwidth // 8)

    def watched_load(builder: Any, places: Any, mask: Any, *rest: Any) -> Any:
        traffic.loaded += num_bytes(places, mask)
        return load(builder, places, mask, *rest)

    def watched_store(builder: Any, places: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.stored += num_bytes(places, mask)
        return store(builder, places, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", watched_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", watched_store)
        yield traffic


HALF = torch.bfloat16
ROWS, SIZE = 3, 256


def half(*shape: int) -> Tensor:
    return torch.randn(shape).to(HALF)


def test_norms_and_gates_move_nothing_twice() -> None:
    x, weight = half(ROWS, SIZE), torch.randn(SIZE)
    with counting() as norm:
        rms_norm(x, weight, 1e-6)
    assert norm.total == 2 * x.nbytes + ROWS * weight.nbytes  # every row's program reads the weight, from the cache
    with counting() as added:
        add_rms_norm(x, half(ROWS, SIZE), weight, 1e-6)
    assert added.total == 4 * x.nbytes + ROWS * weight.nbytes
    with counting() as gate:
        gate_and_multiply(half(ROWS, 2 * SIZE), "gelu_tanh")
    assert gate.total == 3 * x.nbytes


@pytest.mark.parametrize("gated", [False, True])
def test_products_of_few_rows_read_their_weights_once(gated: bool) -> None:
    """Every program reads the rows, twice with a norm: they stay in the cache, and are small beside the weights."""
    outputs = 96
    x, residual, norm = half(ROWS, SIZE), half(ROWS, SIZE), torch.randn(SIZE)
    weight = half(outputs * (1 + gated), SIZE)
    constants = few_rows._constants(HALF, SIZE, outputs, few_rows.ROWS, (0, 1, False), has_gate=gated)
    programs = outputs // int(constants["TILE"])
    with counting() as traffic:
        out, total = few_rows.product_of_few_rows(
            x, weight, residual=residual, norm=norm, eps=1e-6, activation="silu" if gated else None
        )
    rows = programs * (2 * (x.nbytes + residual.nbytes) + norm.nbytes)
    assert traffic.loaded == weight.nbytes + rows
    assert traffic.stored == out.nbytes + total.nbytes


def test_rotation_and_write_move_nothing_twice() -> None:
    heads, kv_heads, dim, block_size = 4, 2, 64, 16
    qkv, weight = half(ROWS, (heads + 2 * kv_heads) * dim), torch.randn(dim)
    cos, sin = torch.rand(2, ROWS, 1, dim // 2)
    caches = half(2, block_size, kv_heads, dim), half(2, block_size, kv_heads, dim)
    slots = torch.tensor([3, -1, 20])
    with counting() as traffic:
        rotate_and_write(qkv, (weight, weight, 1e-6, cos, sin), caches, slots)
    assert traffic.stored == qkv.nbytes - 2 * kv_heads * dim * HALF.itemsize, "a token without a slot has no K and V"
    programs = 3  # of a token: the heads of q, of k, of v
    constants = ROWS * (programs * slots.itemsize + 2 * (weight.nbytes + 2 * cos[0].nbytes))
    assert traffic.loaded == qkv.nbytes + constants


def test_writing_moves_nothing_twice() -> None:
    k, v = half(ROWS, 2, 64), half(ROWS, 2, 64)
    caches, slots = (half(2, 16, 2, 64), half(2, 16, 2, 64)), torch.tensor([3, -1, 20])
    with counting() as traffic:
        write_kv(k, v, caches, slots)
    assert traffic.loaded == k.nbytes + v.nbytes + 2 * slots.nbytes, "K and V have a program each"
    assert traffic.stored == k[:2].nbytes + v[:2].nbytes
