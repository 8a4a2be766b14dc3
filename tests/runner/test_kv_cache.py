"""How large the KV pool is, and from which memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.runner import kv_cache
from nanoengine.runner.kv_cache import KVCache, available_ram, cpu_kv_bytes, gpu_kv_bytes
from tests.support import QWEN3_06B

MIB = 2**20
GIB = 2**30
CPU = torch.device("cpu")


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
    cache = KVCache(num_blocks, QWEN3_06B, backend(block_size), torch.bfloat16, CPU)
    taken = sum(tensor.numel() * tensor.itemsize for layer in cache.layers for tensor in layer)
    with_null_block = num_blocks + 1
    assert taken == with_null_block * block_size * QWEN3_06B.kv_bytes_per_token(2)


@both_layouts
def test_every_layer_has_k_and_v_of_the_backends_shape(backend: type[TorchAttention]) -> None:
    cache = KVCache(2, QWEN3_06B, backend(4), torch.float32, CPU)
    assert len(cache.layers) == QWEN3_06B.num_layers
    assert {tensor.shape for layer in cache.layers for tensor in layer} == {backend(4).kv_shape(3, 8, 128)}


@both_layouts
def test_k_and_v_and_layers_do_not_share_memory(backend: type[TorchAttention]) -> None:
    cache = KVCache(2, QWEN3_06B, backend(2), torch.float32, CPU)
    tensors = [tensor for layer in cache.layers for tensor in layer]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors) == 2 * QWEN3_06B.num_layers
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
    assert all((tensor == i).all() for i, tensor in enumerate(tensors))


def test_all_layers_of_a_block_lie_side_by_side_where_the_backend_asks_for_it() -> None:
    cache = KVCache(2, QWEN3_06B, BlockMajor(2), torch.float32, CPU)
    tensors = [tensor for layer in cache.layers for tensor in layer]
    addresses = [tensor[block].data_ptr() for block in range(3) for tensor in tensors]
    assert all(tensor[block].is_contiguous() for block in range(3) for tensor in tensors)
    piece = tensors[0][0].nbytes
    assert addresses == [addresses[0] + i * piece for i in range(len(addresses))]


def test_blocks_of_a_layer_lie_side_by_side_where_it_does_not() -> None:
    cache = KVCache(2, QWEN3_06B, TorchAttention(2), torch.float32, CPU)
    assert all(tensor.is_contiguous() for layer in cache.layers for tensor in layer)


@both_layouts
def test_fill_reaches_every_slot(backend: type[TorchAttention]) -> None:
    cache = KVCache(2, QWEN3_06B, backend(2), torch.float32, CPU)
    cache.fill(float("nan"))
    assert all(tensor.isnan().all() for layer in cache.layers for tensor in layer)


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


def fake_files(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """Let the system's memory files have this content; those not named do not exist."""

    def read_text(path: Path, *_: object, **__: object) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(kv_cache.Path, "read_text", read_text)


MEMINFO = {"/proc/meminfo": "MemTotal:       33554432 kB\nMemFree: 1 kB\nMemAvailable:   16777216 kB\n"}


def cgroup(limit: str, used: int, active_file: int = 0, inactive_file: int = 0) -> dict[str, str]:
    stat = f"anon 5\nfile 7\ninactive_anon 11\ninactive_file {inactive_file}\nactive_file {active_file}\nslab 13\n"
    files = {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}
    return {str(kv_cache.CGROUP / name): content for name, content in files.items()}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MEMINFO, 16 * GIB),
        (MEMINFO | cgroup("max", 5 * GIB), 16 * GIB),
        (MEMINFO | cgroup(str(8 * GIB), 3 * GIB), 5 * GIB),  # the container has less than the machine
        (MEMINFO | cgroup(str(64 * GIB), 3 * GIB), 16 * GIB),  # the machine has less than the container may take
        (MEMINFO | cgroup(str(2 * GIB), 3 * GIB), 0),  # over its limit
        (MEMINFO | cgroup(str(8 * GIB), 7 * GIB, 2 * GIB, 3 * GIB), 6 * GIB),  # cached files make room for others
        (MEMINFO | cgroup(str(64 * GIB), 63 * GIB, 30 * GIB, 30 * GIB), 16 * GIB),
        (MEMINFO | cgroup("max", 5 * GIB, 2 * GIB, 3 * GIB), 16 * GIB),
    ],
)
def test_available_ram_is_the_machines_or_the_containers(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    fake_files(monkeypatch, files)
    assert available_ram() == expected


@pytest.mark.parametrize("meminfo", [{}, {"/proc/meminfo": "MemTotal: 33554432 kB\n"}])
def test_available_ram_without_meminfo_is_half_of_the_physical(
    monkeypatch: pytest.MonkeyPatch, meminfo: dict[str, str]
) -> None:
    fake_files(monkeypatch, meminfo)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert available_ram() == 1000 * 4096 // 2


def test_available_ram_of_this_machine_is_plausible() -> None:
    assert 0 <= available_ram() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("available", "expected"), [(16 * GIB, 4 * GIB), (8 * GIB, 4 * GIB), (3 * GIB, 3 * GIB // 2)])
def test_the_cpu_takes_half_of_the_ram_and_at_most_4_gib(
    monkeypatch: pytest.MonkeyPatch, available: int, expected: int
) -> None:
    monkeypatch.setattr(kv_cache, "available_ram", lambda: available)
    assert cpu_kv_bytes() == expected
