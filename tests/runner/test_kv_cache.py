"""The tensors of the KV pool: how much they take, and how they lie."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.engine.kv.groups import FULL, WINDOW, KVSpec, group_layers
from nanoengine.models.model_config import LayerConfig
from nanoengine.runner.kv_cache import KVCache, bytes_of_layer, kv_specs
from tests.support import QWEN3_06B

MIB = 2**20
CPU = torch.device("cpu")
ONE_GROUP = group_layers([KVSpec()] * QWEN3_06B.num_layers)


class BlockMajor(TorchAttention):
    """A backend that wants all layers of a block side by side."""

    block_major = True


both_layouts = pytest.mark.parametrize("backend", [TorchAttention, BlockMajor])


def test_bytes_of_qwen3_06b() -> None:
    assert QWEN3_06B.kv_bytes_per_token(2) == 112 * 1024
    assert 256 * QWEN3_06B.kv_bytes_per_token(2) == 28 * MIB
    assert 17_408 * MIB // (256 * QWEN3_06B.kv_bytes_per_token(2)) == 621


def test_bytes_of_a_token_scale_with_the_dtype() -> None:
    assert QWEN3_06B.kv_bytes_per_token(4) == 2 * QWEN3_06B.kv_bytes_per_token(2)


@both_layouts
def test_the_tensors_take_what_the_formula_says(backend: type[TorchAttention]) -> None:
    num_blocks, block_size = 3, 4
    cache = KVCache(num_blocks, QWEN3_06B, ONE_GROUP, backend(block_size), torch.bfloat16, CPU)
    taken = sum(tensor.numel() * tensor.itemsize for layer in cache.layers for tensor in layer)
    with_null_block = num_blocks + 1
    assert taken == with_null_block * block_size * QWEN3_06B.kv_bytes_per_token(2)


@both_layouts
def test_every_layer_has_k_and_v_of_the_backends_shape(backend: type[TorchAttention]) -> None:
    cache = KVCache(2, QWEN3_06B, ONE_GROUP, backend(4), torch.float32, CPU)
    assert len(cache.layers) == QWEN3_06B.num_layers
    assert {tensor.shape for layer in cache.layers for tensor in layer} == {backend(4).kv_shape(3, 8, 128)}


@both_layouts
def test_k_and_v_and_layers_do_not_share_memory(backend: type[TorchAttention]) -> None:
    cache = KVCache(2, QWEN3_06B, ONE_GROUP, backend(2), torch.float32, CPU)
    tensors = [tensor for layer in cache.layers for tensor in layer]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors) == 2 * QWEN3_06B.num_layers
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
    assert all((tensor == i).all() for i, tensor in enumerate(tensors))


def test_all_layers_of_a_block_lie_side_by_side_where_the_backend_asks_for_it() -> None:
    cache = KVCache(2, QWEN3_06B, ONE_GROUP, BlockMajor(2), torch.float32, CPU)
    tensors = [tensor for layer in cache.layers for tensor in layer]
    addresses = [tensor[block].data_ptr() for block in range(3) for tensor in tensors]
    assert all(tensor[block].is_contiguous() for block in range(3) for tensor in tensors)
    piece = tensors[0][0].nbytes
    assert addresses == [addresses[0] + i * piece for i in range(len(addresses))]


def test_blocks_of_a_layer_lie_side_by_side_where_it_does_not() -> None:
    cache = KVCache(2, QWEN3_06B, ONE_GROUP, TorchAttention(2), torch.float32, CPU)
    assert all(tensor.is_contiguous() for layer in cache.layers for tensor in layer)


@both_layouts
def test_fill_reaches_every_slot(backend: type[TorchAttention]) -> None:
    cache = KVCache(2, QWEN3_06B, ONE_GROUP, backend(2), torch.float32, CPU)
    cache.fill(float("nan"))
    assert all(tensor.isnan().all() for layer in cache.layers for tensor in layer)


@pytest.mark.parametrize(("value", "read"), [(float("nan"), float("nan")), (0.0, 0.0)])
def test_fill_reaches_the_scales_of_an_int8_cache(value: float, read: float) -> None:
    cache = KVCache(2, QWEN3_06B, ONE_GROUP, TorchAttention(2), torch.int8, CPU)
    for before in (1, -1):
        for tensor in (tensor for layer in cache.layers for tensor in layer):
            tensor.fill_(before)
        cache.fill(value)
        scales = [tensor[..., -4:].view(torch.float32) for layer in cache.layers for tensor in layer]
        assert all(torch.equal(scale.nan_to_num(7.0), torch.full_like(scale, read).nan_to_num(7.0)) for scale in scales)


@both_layouts
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_the_bytes_of_a_block_are_those_that_it_takes(backend: type[TorchAttention], dtype: torch.dtype) -> None:
    cache = KVCache(2, QWEN3_06B, ONE_GROUP, backend(4), dtype, CPU)
    taken = sum(tensor.nbytes for layer in cache.layers for tensor in layer)
    assert taken == 3 * QWEN3_06B.num_layers * bytes_of_layer(QWEN3_06B, backend(4), dtype)


# ---- groups


@both_layouts
def test_the_layers_that_come_first_in_their_groups_share_tensors_and_so_on(backend: type[TorchAttention]) -> None:
    """28 layers, every fourth of which sees all: three groups of seven with a window, one without."""
    window, full = LayerConfig(rope=None, window=100), LayerConfig(rope=None)
    model = replace(QWEN3_06B, layers=(window, window, window, full))
    groups = group_layers(kv_specs(model))
    assert [group.spec.kind for group in groups] == [WINDOW, WINDOW, WINDOW, FULL]
    cache = KVCache(2, model, groups, backend(4), torch.float32, CPU)
    taken = sum(tensor.nbytes for place in cache.places for tensor in place)
    assert taken == 3 * 4 * QWEN3_06B.kv_bytes_per_token(4) // 4, "a block holds a quarter of the layers"
    for number, group in enumerate(groups):
        for place, layer in enumerate(group.layers):
            assert cache.groups[layer] == number
            assert cache.layers[layer] is cache.places[place]


def test_a_group_with_fewer_layers_leaves_room_empty() -> None:
    window, full = LayerConfig(rope=None, window=100), LayerConfig(rope=None)
    model = replace(QWEN3_06B, num_layers=5, layers=(full, window, window, full, window))
    groups = group_layers(kv_specs(model))
    assert [group.layers for group in groups] == [(0, 3), (1, 2), (4,)]
    cache = KVCache(2, model, groups, TorchAttention(4), torch.float32, CPU)
    assert len(cache.places) == 2
    assert cache.layers[4] is cache.places[0]
