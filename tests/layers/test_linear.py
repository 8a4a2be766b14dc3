"""Linear against its formula, and its parts as windows onto one weight."""

from __future__ import annotations

import pytest
import torch

from nanoengine.layers.linear import Linear


def filled(*sizes: int, bias: bool) -> Linear:
    layer = Linear(*sizes, bias=bias)
    for parameter in layer.parameters():
        parameter.normal_()
    return layer


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_x_times_the_weight_transposed_plus_the_bias(bias: bool) -> None:
    layer = filled(5, 3, 4, bias=bias)
    x = torch.randn(6, 5)
    expected = x.double() @ layer.weight.double().T
    if layer.bias is not None:
        expected = expected + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_without_bias_there_is_none() -> None:
    assert filled(5, 3, bias=False).bias is None


@pytest.mark.parametrize("bias", [False, True])
def test_parts_have_the_names_and_shapes_of_a_checkpoint(bias: bool) -> None:
    parts = filled(5, 6, 2, 2, bias=bias).parts("layer.attn", "q", "k", "v")
    shapes = {f"layer.attn.{name}.weight": (rows, 5) for name, rows in (("q", 6), ("k", 2), ("v", 2))}
    if bias:
        shapes |= {f"layer.attn.{name}.bias": (rows,) for name, rows in (("q", 6), ("k", 2), ("v", 2))}
    assert {name: tuple(part.shape) for name, part in parts.items()} == shapes


def test_what_is_copied_into_a_part_is_in_the_layer() -> None:
    layer = filled(5, 6, 2, 3, bias=True)
    separate = [filled(5, rows, bias=True) for rows in (6, 2, 3)]
    parts = layer.parts("x", "a", "b", "c")
    for name, source in zip("abc", separate, strict=True):
        parts[f"x.{name}.weight"].copy_(source.weight)
        assert source.bias is not None
        parts[f"x.{name}.bias"].copy_(source.bias)
    x = torch.randn(4, 5)
    torch.testing.assert_close(layer(x), torch.cat([source(x) for source in separate], dim=-1))


def test_parts_cover_every_number_of_the_layer() -> None:
    layer = filled(5, 6, 2, 3, bias=True)
    for part in layer.parts("x", "a", "b", "c").values():
        part.fill_(7.0)
    assert all((parameter == 7.0).all() for parameter in layer.parameters())


def test_a_name_too_few_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="zip"):
        filled(5, 6, 2, bias=False).parts("x", "a")
