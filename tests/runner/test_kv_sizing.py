"""The size of the pool and the longest sequence: by options, by memory, and what is said where there is no room."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from nanoengine.config import EngineConfig
from nanoengine.engine.kv.groups import WINDOW, Groups, KVSpec
from nanoengine.errors import InvalidConfig, KVCacheTooSmall
from nanoengine.runner import kv_sizing as module
from nanoengine.runner.kv_sizing import (
    PoolSize,
    cpu_kv_bytes,
    gpu_kv_bytes,
    host_kv_bytes,
    size_host_tier,
    size_pool,
)
from tests.support import QWEN3_06B

MIB = 2**20
GIB = 2**30
LIMIT = 512
BLOCK_BYTES = 8192
"""Of 16 tokens."""

Specs = tuple[KVSpec, ...]
ONE: Specs = (KVSpec(),)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def size(
    device: torch.device = CPU, gpu: int | None = None, limit: int = LIMIT, specs: Specs = ONE, **options: Any
) -> PoolSize:
    """The pool of a model with `limit` positions; `gpu` is what would be measured, if it may be."""

    def measure() -> int:
        assert gpu is not None, "measured"
        return gpu

    config = EngineConfig(model="x", **options)
    groups = Groups(specs, config.block_size, config.most_new_tokens)
    return size_pool(config, limit, groups, BLOCK_BYTES * config.block_size // 16, device, measure)


@pytest.fixture
def ram(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with 100 blocks' worth of RAM to spare."""
    monkeypatch.setattr(module, "cpu_kv_bytes", lambda: 100 * BLOCK_BYTES)
    return monkeypatch


# ---- where the size comes from


def test_num_kv_blocks_are_usable_ones_and_the_null_block_comes_on_top() -> None:
    assert size(num_kv_blocks=40) == PoolSize(40, LIMIT, "num_kv_blocks")


@pytest.mark.parametrize(("rest", "num_blocks"), [(0, 49), (1, 49), (BLOCK_BYTES - 1, 49), (BLOCK_BYTES, 50)])
def test_kv_cache_memory_is_never_exceeded_and_used_to_the_last_block(rest: int, num_blocks: int) -> None:
    """One block of it is the null block."""
    assert size(kv_cache_memory=50 * BLOCK_BYTES + rest) == PoolSize(num_blocks, LIMIT, "kv_cache_memory")


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_the_pool_in_bytes_does_not_depend_on_the_block_size(block_size: int) -> None:
    pool = size(kv_cache_memory=600_000, block_size=block_size)
    bytes_per_block = BLOCK_BYTES * block_size // 16
    assert 0 <= 600_000 - (pool.num_blocks + 1) * bytes_per_block < bytes_per_block


def test_17408_mib_are_621_blocks_of_qwen3_06b_and_one_of_them_is_the_null_block() -> None:
    block_bytes = 256 * QWEN3_06B.kv_bytes_per_token(2)
    config = EngineConfig(model="x", block_size=256, kv_cache_memory=17_408 * MIB)
    pool = size_pool(
        config, QWEN3_06B.max_position_embeddings, Groups(ONE, 256), block_bytes, CUDA, lambda: pytest.fail("measured")
    )
    assert pool.num_blocks + 1 == 621
    assert pool.max_model_len == 40_960
    config = EngineConfig(model="x", block_size=256)
    pool = size_pool(
        config, QWEN3_06B.max_position_embeddings, Groups(ONE, 256), block_bytes, CUDA, lambda: 17_408 * MIB
    )
    assert pool == PoolSize(620, 40_960, "gpu_memory_utilization 0.9")


@pytest.mark.usefixtures("ram")
def test_by_default_the_pool_comes_from_free_memory() -> None:
    pool = size()
    assert pool.num_blocks == 99
    assert "available RAM" in pool.source


@pytest.mark.parametrize("options", [{"num_kv_blocks": 40}, {"kv_cache_memory": 41 * BLOCK_BYTES}], ids=str)
def test_nothing_is_measured_where_a_size_is_asked_for(
    options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "cpu_kv_bytes", lambda: pytest.fail("measured"))
    for device in (CPU, CUDA):
        assert size(device, **options).num_blocks == 40


def test_a_gpu_is_measured_where_no_size_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_kv_bytes", lambda: pytest.fail("measured"))
    pool = size(CUDA, gpu=100 * BLOCK_BYTES + 5, gpu_memory_utilization=0.8)
    assert pool == PoolSize(99, LIMIT, "gpu_memory_utilization 0.8")


@pytest.mark.usefixtures("ram")
def test_a_cpu_has_no_gpu_to_measure() -> None:
    assert size(CPU, gpu=None).num_blocks == 99


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_the_automatic_pool_is_no_larger_than_what_can_run_at_once(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(module, "cpu_kv_bytes", lambda: 1 << 33)
    pool = size(device, gpu=1 << 33, max_num_seqs=3, max_model_len=100)
    assert pool == PoolSize(3 * 7, 100, "max_num_seqs x max_model_len")


@pytest.mark.parametrize("options", [{"num_kv_blocks": 50}, {"kv_cache_memory": 51 * BLOCK_BYTES}], ids=str)
def test_a_size_asked_for_is_taken_though_fewer_blocks_can_run_at_once(options: dict[str, int]) -> None:
    """The rest holds prefixes."""
    assert size(max_num_seqs=3, max_model_len=100, **options).num_blocks == 50 > 3 * 7


# ---- max_model_len


def test_max_model_len_is_the_models_own_if_it_fits() -> None:
    assert size(num_kv_blocks=LIMIT // 16).max_model_len == LIMIT
    assert size(num_kv_blocks=10 * LIMIT).max_model_len == LIMIT


@pytest.mark.parametrize(("num_blocks", "expected"), [(1, 16), (5, 80), (31, 496)])
def test_max_model_len_is_lowered_to_the_pool(num_blocks: int, expected: int) -> None:
    assert size(num_kv_blocks=num_blocks).max_model_len == expected


@pytest.mark.parametrize("asked", [2, 100, 112, LIMIT])
def test_max_model_len_asked_for_is_kept(asked: int) -> None:
    assert size(num_kv_blocks=-(-asked // 16), max_model_len=asked).max_model_len == asked


def test_max_model_len_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"max_model_len is 513.*512 positions"):
        size(num_kv_blocks=64, max_model_len=513)


def test_max_model_len_1_leaves_no_room_for_a_new_token() -> None:
    with pytest.raises(InvalidConfig, match="max_model_len is 1"):
        size(num_kv_blocks=64, max_model_len=1)


def test_a_bad_max_model_len_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(InvalidConfig):
        size(CUDA, gpu=None, max_model_len=513)


# ---- too small


@pytest.mark.parametrize(
    ("options", "gpu"),
    [
        ({"num_kv_blocks": 6, "max_model_len": 100}, None),
        ({"kv_cache_memory": 7 * BLOCK_BYTES, "max_model_len": 100}, None),  # one is the null block
        ({"kv_cache_memory": 1}, None),
        ({"num_kv_blocks": 1, "block_size": 1}, None),  # no room for a prompt token and a new one
        ({"max_model_len": 100}, 7 * BLOCK_BYTES),
        ({}, 0),
        ({}, -5_000_000),  # others hold more than the share
    ],
    ids=str,
)
def test_a_pool_too_small_for_one_sequence_names_the_knobs(options: dict[str, Any], gpu: int | None) -> None:
    with pytest.raises(KVCacheTooSmall) as raised:
        size(CPU if gpu is None else CUDA, gpu, **options)
    for knob in ("max_model_len", "num_kv_blocks", "kv_cache_memory", "gpu_memory_utilization"):
        assert knob in str(raised.value)
    assert re.search(r"needs \d+", str(raised.value))


def test_one_block_more_is_enough() -> None:
    assert size(num_kv_blocks=7, max_model_len=100).num_blocks == 7
    assert size(kv_cache_memory=8 * BLOCK_BYTES, max_model_len=100).num_blocks == 7
    assert size(num_kv_blocks=2, block_size=1).max_model_len == 2
    assert size(CUDA, 2 * BLOCK_BYTES).max_model_len == 16


def test_a_machine_without_free_memory_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_kv_bytes", lambda: 0)
    with pytest.raises(KVCacheTooSmall, match="0 blocks"):
        size()


# ---- the host tier


def host_blocks(max_model_len: int = LIMIT, block_bytes: int = BLOCK_BYTES, **options: Any) -> int:
    return size_host_tier(EngineConfig(model="x", **options), max_model_len, Groups(), block_bytes)


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 1,000 blocks' worth of RAM to spare, of which swapped blocks take 100 unasked."""
    monkeypatch.setattr(module, "available_ram", lambda: 1000 * BLOCK_BYTES)
    monkeypatch.setattr(module, "host_kv_bytes", lambda: 100 * BLOCK_BYTES)


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0),
        ({"preemption_mode": "swap"}, 100),
        ({"preemption_mode": "auto"}, 100),
        ({"kv_host_memory": 7 * BLOCK_BYTES + 5}, 7),
        ({"kv_host_memory": 5}, 0),
        ({"preemption_mode": "swap", "kv_host_memory": 7 * BLOCK_BYTES}, 7),
        ({"kv_host_memory": 1000 * BLOCK_BYTES}, 1000),
    ],
    ids=str,
)
def test_host_memory_is_what_was_asked_for_or_what_swapping_needs(options: dict[str, Any], expected: int) -> None:
    assert host_blocks(**options) == expected


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ({"max_model_len": 512}, {}, 32),  # one sequence
        ({"max_model_len": 513}, {}, 33),
        ({"max_model_len": 16}, {}, 16),  # the fewest
        ({"max_model_len": 10**6, "block_bytes": MIB}, {}, 256),  # 256 MiB
        ({"max_model_len": 10**6, "block_bytes": 64 * MIB}, {}, 16),
        ({"max_model_len": 512}, {"preemption_mode": "swap"}, 100),
        ({"max_model_len": 16 * 300}, {"preemption_mode": "swap"}, 300),
        ({"max_model_len": 512}, {"kv_host_memory": 7 * BLOCK_BYTES}, 7),  # the user's own word
        ({"max_model_len": 512}, {"kv_host_memory": 1}, 1),
    ],
    ids=str,
)
def test_files_go_through_host_memory(sizes: dict[str, int], options: dict[str, Any], expected: int) -> None:
    assert host_blocks(kv_disk_path="x", **sizes, **options) == expected


@pytest.mark.usefixtures("roomy")
def test_more_host_memory_than_there_is_is_refused() -> None:
    too_much = 1000 * BLOCK_BYTES + 1
    with pytest.raises(
        InvalidConfig, match=rf"kv_host_memory is {too_much} bytes, but {1000 * BLOCK_BYTES} bytes of RAM"
    ):
        host_blocks(kv_host_memory=too_much)


# ---- bytes


@pytest.mark.parametrize(
    ("total", "free", "utilization", "needed", "expected"),
    [
        (24 * GIB, 22 * GIB, 1.0, 0, 22 * GIB),  # all that is free
        (24 * GIB, 22 * GIB, 0.5, 0, 10 * GIB),  # half of the device, 2 GiB of it taken by somebody
        (24 * GIB, 22 * GIB, 0.5, 3 * GIB, 7 * GIB),  # and a forward pass needs 3 GiB beyond what is held
        (24 * GIB, 4 * GIB, 0.5, 0, -8 * GIB),  # others hold more than the share
        (32_768 * MIB, 30_000 * MIB, 0.75, 4_400 * MIB, 17_408 * MIB),
    ],
)
def test_gpu_bytes_are_the_share_less_what_is_used_less_what_a_step_needs(
    total: int, free: int, utilization: float, needed: int, expected: int
) -> None:
    assert gpu_kv_bytes(total, free, utilization, needed) == expected


@pytest.mark.parametrize(("available", "expected"), [(16 * GIB, 4 * GIB), (8 * GIB, 4 * GIB), (3 * GIB, 3 * GIB // 2)])
def test_the_cpu_takes_half_of_the_ram_and_at_most_4_gib(
    monkeypatch: pytest.MonkeyPatch, available: int, expected: int
) -> None:
    monkeypatch.setattr(module, "available_ram", lambda: available)
    assert cpu_kv_bytes() == expected


@pytest.mark.parametrize(("available", "expected"), [(32 * GIB, 4 * GIB), (16 * GIB, 4 * GIB), (4 * GIB, GIB)])
def test_swapped_blocks_take_a_quarter_of_the_ram_and_at_most_4_gib(
    monkeypatch: pytest.MonkeyPatch, available: int, expected: int
) -> None:
    monkeypatch.setattr(module, "available_ram", lambda: available)
    assert host_kv_bytes() == expected


# ---- groups


def test_a_window_takes_no_more_than_it_sees_and_a_step() -> None:
    """A window of 100 tokens and chunks of 64: 12 blocks of 16 at most, however long the sequence."""
    specs = (KVSpec(), KVSpec(WINDOW, 100))
    options: dict[str, Any] = {"specs": specs, "max_num_batched_tokens": 64, "max_model_len": LIMIT}
    assert size(num_kv_blocks=32 + 12, **options).max_model_len == LIMIT
    with pytest.raises(KVCacheTooSmall, match=r"43 blocks .* needs 44"):
        size(num_kv_blocks=43, **options)


@pytest.mark.parametrize("num_blocks", [2, 3, 20, 24, 25, 43, 44])
def test_the_longest_sequence_is_the_longest_that_all_groups_hold(num_blocks: int) -> None:
    specs = (KVSpec(), KVSpec(WINDOW, 100))
    config = EngineConfig(model="x", max_num_batched_tokens=64)
    needed = Groups(specs, 16, config.most_new_tokens).blocks_at_once
    longest = size(num_kv_blocks=num_blocks, specs=specs, max_num_batched_tokens=64).max_model_len
    assert needed(longest) <= num_blocks
    assert longest == LIMIT or needed(longest + 1) > num_blocks
