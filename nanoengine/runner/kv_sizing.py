"""How many blocks the KV pool has, and how long a sequence may get: from the options, or from the memory there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanoengine.config import EngineConfig
from nanoengine.core.ram import available_ram
from nanoengine.engine.kv.groups import Groups
from nanoengine.errors import InvalidConfig, KVCacheTooSmall

CPU_CAP = 4 << 30
"""Most bytes of KV that a CPU engine takes unasked; `kv_cache_memory` asks for more."""

CPU_SHARE = 0.5
"""Share of the available RAM that a CPU engine takes at most unasked; the rest is for weights' copies and other programs."""

HOST_SHARE = 0.25
"""Share of the available RAM that swapped blocks take at most unasked."""

STAGING_BYTES = 256 << 20
"""Most host memory that files go through unasked."""

STAGING_BLOCKS = 16
"""The fewest blocks of it."""


@dataclass(frozen=True)
class PoolSize:
    """Blocks of the pool, but for the null block, and the longest sequence."""

    num_blocks: int
    max_model_len: int
    source: str  # what they follow from


def size_pool(
    config: EngineConfig,
    max_positions: int,
    groups: Groups,
    block_bytes: int,
    device: torch.device,
    measure_gpu: Callable[[], int],
) -> PoolSize:
    """The size of the pool.

    Args:
        max_positions: longest sequence that the model was made for.
        groups: that take blocks from it.
        block_bytes: bytes of one block, in all layers of a group.
        measure_gpu: finds how many bytes of a GPU are left for the pool.

    Raises:
        InvalidConfig: max_model_len is out of range.
        KVCacheTooSmall: there is no room for one sequence.
    """
    _check_max_model_len(config.max_model_len, max_positions)
    wanted_len = config.max_model_len or max_positions
    blocks_per_sequence = groups.blocks_at_once(wanted_len)
    num_blocks, source = _wanted_blocks(config, block_bytes, device, measure_gpu)
    most = blocks_per_sequence * config.max_num_seqs
    if config.num_kv_blocks is None and config.kv_cache_memory is None and num_blocks > most:
        num_blocks, source = most, "max_num_seqs x max_model_len"  # more could never be in use at once
    max_model_len = groups.longest(num_blocks, wanted_len)
    if max_model_len < (wanted_len if config.max_model_len is not None else 2):
        raise KVCacheTooSmall(
            f"the KV pool ({source}) has {num_blocks} blocks of {config.block_size} tokens "
            f"({block_bytes} bytes each), but one sequence of max_model_len {wanted_len} needs {blocks_per_sequence}: "
            f"lower max_model_len{_or_chunks(groups)}, or raise num_kv_blocks, kv_cache_memory "
            "or (on a GPU) gpu_memory_utilization"
        )
    return PoolSize(num_blocks, max_model_len, source)


def size_host_tier(config: EngineConfig, max_model_len: int, groups: Groups, block_bytes: int) -> int:
    """Blocks of host memory for what the pool has no room for, or that files go through.

    Args:
        max_model_len: longest sequence of this engine.
        groups: whose blocks go there.
        block_bytes: bytes of one block, in all layers of a group.

    Raises:
        InvalidConfig: kv_host_memory is more than there is.
    """
    if config.kv_host_memory is not None:
        available = available_ram()
        if config.kv_host_memory > available:
            raise InvalidConfig(
                f"kv_host_memory is {config.kv_host_memory} bytes, but {available} bytes of RAM are available: lower it"
            )
        num_blocks = config.kv_host_memory // block_bytes
    elif config.preemption_mode != "recompute":
        num_blocks = host_kv_bytes() // block_bytes
    else:
        num_blocks = 0
    if config.kv_disk_path is None:
        return num_blocks
    # Files are read and written by way of host memory: those of one sequence should find room there together.
    blocks_per_sequence = groups.blocks_at_once(max_model_len)
    staging = max(min(blocks_per_sequence, STAGING_BYTES // block_bytes), STAGING_BLOCKS)
    return max(num_blocks, staging if config.kv_host_memory is None else 1)


def _wanted_blocks(
    config: EngineConfig, block_bytes: int, device: torch.device, measure_gpu: Callable[[], int]
) -> tuple[int, str]:
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks, "num_kv_blocks"
    if config.kv_cache_memory is not None:
        num_bytes, source = config.kv_cache_memory, "kv_cache_memory"
    elif device.type == "cpu":
        num_bytes, source = cpu_kv_bytes(), "half of the available RAM, at most 4 GiB"
    else:
        num_bytes, source = measure_gpu(), f"gpu_memory_utilization {config.gpu_memory_utilization}"
    return max(num_bytes // block_bytes - 1, 0), source  # one more is the null block


def _or_chunks(groups: Groups) -> str:
    return " or long_prefill_token_threshold, which windows need room for" if groups.forget else ""


def _check_max_model_len(asked: int | None, limit: int) -> None:
    if asked is not None and asked > limit:
        raise InvalidConfig(f"max_model_len is {asked}, but the model was made for at most {limit} positions: lower it")
    if asked is not None and asked < 2:
        raise InvalidConfig(f"max_model_len is {asked}: it must hold a prompt token and a new one, so at least 2")


def cpu_kv_bytes() -> int:
    """Bytes for the KV pool on the CPU when the user names none."""
    return int(min(CPU_CAP, CPU_SHARE * available_ram()))


def host_kv_bytes() -> int:
    """Bytes of host memory for swapped blocks when the user names none."""
    return int(min(CPU_CAP, HOST_SHARE * available_ram()))


def gpu_kv_bytes(total: int, free: int, utilization: float, needed: int) -> int:
    """Bytes for the KV pool on a GPU.

    Args:
        total: memory of the device.
        free: what nobody uses now; all the rest counts as used, by other processes too.
        utilization: share of `total` that may be used in the end.
        needed: bytes that steps of full size take beyond what is in use now.
    """
    return int(total * utilization) - (total - free) - needed
