"""Linear against its formula, and its parts as windows onto one weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanoengine.layers.factory import Factory
from nanoengine.layers.linear import Linear
from nanoengine.layers.norm import RMSNorm


def filled(factory: Factory, *sizes: int, bias: bool) -> tuple[Linear, Tensor]:
    """A layer with one part for each output size, and the weight that it was filled with."""
    layer = Linear(factory, *sizes, bias=bias)
    weight = torch.randn(sum(sizes[1:]), sizes[0])
    names = [str(i) for i in range(len(sizes) - 1)]
    parts = layer.parts("x", *names)
    for name, rows in zip(names, weight.split(sizes[1:]), strict=True):
        parts[f"x.{name}.weight"].copy_(rows)
    if layer.bias is not None:
        layer.bias.normal_()
    return layer, weight


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_x_times_the_weight_transposed_plus_the_bias(factory: Factory, bias: bool) -> None:
    layer, weight = filled(factory, 5, 3, 4, bias=bias)
    x = torch.randn(6, 5)
    expected = x.double() @ weight.double().T
    if layer.bias is not None:
        expected = expected + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [6, 32, 64])  # in a kernel's own panels, and across them
def test_the_gate_is_silu_of_the_first_part_times_the_second(factory: Factory, size: int) -> None:
    layer, weight = filled(factory, 5, size, size, bias=False)
    x = torch.randn(7, 5) * 3
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    torch.testing.assert_close(
        factory.kernels.gated_linear(x, layer.weight).double(), gate / (1 + (-gate).exp()) * up, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("num_rows", [1, 8, 9])  # few, and more
@pytest.mark.parametrize("has_residual", [False, True])
def test_behind_a_norm_it_is_the_norm_and_then_itself(factory: Factory, num_rows: int, has_residual: bool) -> None:
    x = torch.randn(num_rows, 5)
    residual = torch.randn(num_rows, 5) if has_residual else None
    total = x.double() if residual is None else (x + residual).double()
    norm = RMSNorm(factory, 5, 1e-6)
    norm.weight.uniform_(0.5, 1.5)
    normed = total * (total.square().mean(1, keepdim=True) + 1e-6).rsqrt() * norm.weight.double()
    for gated in (False, True):
        layer, weight = filled(factory, 5, 32, 32, bias=not gated)
        exact = normed @ weight.double().T
        if gated:
            gate, up = exact.chunk(2, dim=-1)
            exact = gate / (1 + (-gate).exp()) * up
        elif layer.bias is not None:
            exact = exact + layer.bias.double()
        given = norm, x, None if residual is None else residual.clone()
        out, carried = layer.gated_after_norm(*given, "silu") if gated else layer.after_norm(*given)
        torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(carried.double(), total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1, 32])
def test_large_gates_do_not_overflow(factory: Factory, size: int) -> None:
    layer = Linear(factory, 2, size, size)
    parts = layer.parts("x", "gate", "up")
    parts["x.gate.weight"].copy_(torch.tensor([[1.0, 0.0]]).expand(size, 2))
    parts["x.up.weight"].copy_(torch.tensor([[0.0, 1.0]]).expand(size, 2))
    out = factory.kernels.gated_linear(torch.tensor([[-1e4, 3.0], [1e4, 3.0]]), layer.weight)
    torch.testing.assert_close(out, torch.tensor([[0.0], [3e4]]).expand(2, size))


def test_without_bias_there_is_none(factory: Factory) -> None:
    assert filled(factory, 5, 3, bias=False)[0].bias is None


@pytest.mark.parametrize("bias", [False, True])
def test_parts_have_the_names_and_shapes_of_a_checkpoint(factory: Factory, bias: bool) -> None:
    parts = Linear(factory, 5, 6, 2, 2, bias=bias).parts("layer.attn", "q", "k", "v")
    shapes = {f"layer.attn.{name}.weight": (rows, 5) for name, rows in (("q", 6), ("k", 2), ("v", 2))}
    if bias:
        shapes |= {f"layer.attn.{name}.bias": (rows,) for name, rows in (("q", 6), ("k", 2), ("v", 2))}
    assert {name: tuple(part.shape) for name, part in parts.items()} == shapes


def test_what_is_copied_into_a_part_is_in_the_layer(factory: Factory) -> None:
    layer = Linear(factory, 5, 6, 2, 3, bias=True)
    separate = [filled(factory, 5, rows, bias=True) for rows in (6, 2, 3)]
    parts = layer.parts("x", "a", "b", "c")
    for name, (source, weight) in zip("abc", separate, strict=True):
        parts[f"x.{name}.weight"].copy_(weight)
        assert source.bias is not None
        parts[f"x.{name}.bias"].copy_(source.bias)
    x = torch.randn(4, 5)
    torch.testing.assert_close(layer(x), torch.cat([source(x) for source, _ in separate], dim=-1))


def test_parts_cover_every_number_of_the_layer(factory: Factory) -> None:
    layer = Linear(factory, 5, 6, 2, 3, bias=True)
    for part in layer.parts("x", "a", "b", "c").values():
        part.copy_(torch.full(tuple(part.shape), 7.0))
    assert torch.equal(layer(torch.eye(5)), torch.full((5, 11), 14.0))


def test_a_name_too_few_is_a_mistake(factory: Factory) -> None:
    with pytest.raises(ValueError, match="zip"):
        Linear(factory, 5, 6, 2, 3).parts("x", "a", "b")


def test_one_name_is_that_of_all_rows(factory: Factory) -> None:
    layer = Linear(factory, 5, 6, 2, bias=True)
    source = torch.nn.Linear(5, 8)
    parts = layer.parts("x", "both")
    parts["x.both.weight"].copy_(source.weight.data)
    parts["x.both.bias"].copy_(source.bias.data)
    x = torch.randn(4, 5)
    torch.testing.assert_close(layer(x), source(x))
