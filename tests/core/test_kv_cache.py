"""How large the KV pool is, and which layers share its tensors."""

from __future__ import annotations

import pytest
import torch

from nanoengine.core.config import EngineConfig
from nanoengine.core.device import Device
from nanoengine.core.errors import KVCacheTooSmall
from nanoengine.core.kv_cache import KVCache, size_pool


@pytest.mark.parametrize(
    ("options", "free", "expected"),
    [
        ({}, 5100, (50, 100)),  # no more than all rows can use: 10 sequences of 100 tokens
        ({}, 1350, (12, 100)),
        ({}, 690, (5, 100)),
        ({}, 510, (4, 80)),  # the length is lowered to what the pool holds
        ({"max_model_len": 40}, 5000, (20, 40)),
        ({"num_kv_blocks": 70}, 0, (70, 100)),
        ({"kv_cache_memory": 7100}, 0, (70, 100)),
        ({"kv_cache_memory": 399, "max_model_len": 40}, 9999, (2, 40)),
        ({"num_kv_blocks": 1}, 0, (1, 20)),
    ],
    ids=str,
)
def test_the_size_of_the_pool(options: dict[str, int], free: int, expected: tuple[int, int]) -> None:
    """Memory is for one block more, the null block."""
    config = EngineConfig(model="", max_num_seqs=10, **options)  # type: ignore[arg-type]
    assert size_pool(config, 100, lambda tokens: -(-tokens // 20), 100, free) == expected


@pytest.mark.parametrize(
    ("options", "free"),
    [({}, 199), ({}, -5), ({"max_model_len": 100}, 599), ({"max_model_len": 21, "num_kv_blocks": 1}, 9999)],
    ids=str,
)
def test_a_pool_that_holds_no_sequence_of_the_length_asked_for_is_an_error(options: dict[str, int], free: int) -> None:
    config = EngineConfig(model="", max_num_seqs=10, **options)  # type: ignore[arg-type]
    with pytest.raises(KVCacheTooSmall, match="lower max_model_len, or raise"):
        size_pool(config, 100, lambda tokens: -(-tokens // 20), 100, free)


def test_a_gpu_gives_what_its_share_leaves_beside_what_is_in_use_and_the_largest_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (600, 1000))
    device = Device(torch.device("cuda", 0))
    assert device.kv_bytes(0.9, lambda: 150) == 900 - 400 - 150


def test_layers_of_one_group_have_places_of_their_own_and_those_of_several_groups_share_them() -> None:
    groups = [[0, 3], [1, 4], [2]]
    cache = KVCache(3, groups, (16, 2, 4), torch.float32, torch.device("cpu"))
    assert [cache.groups[layer] for layer in range(5)] == [0, 1, 2, 0, 1]
    where = [k.data_ptr() for k, _ in cache.layers]
    assert len({where[layer] for layer in (0, 3)}) == 2
    assert where[0] == where[1] == where[2]
    assert where[3] == where[4]
    assert len(cache.pool_layers) == 2
    assert all(tensor.shape[0] == 4 for place in cache.pool_layers for tensor in place), "the null block is one more"
    assert all(tensor.shape == (4, 16, 2, 4) for place in cache.pool_layers for tensor in place)
    for place in cache.pool_layers:
        for tensor in place:
            tensor.fill_(torch.nan)
    cache.zero([1, 3])
    kept = [bool(tensor[block].isnan().all()) for place in cache.pool_layers for tensor in place for block in range(4)]
    assert kept == [True, False, True, False] * 4
