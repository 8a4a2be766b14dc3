"""What this capability installs. `install` is called when the runner is there, `attach` when the engine is."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from nanoengine.core.errors import InvalidConfig, shown
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.seams import Gate, KVStore, Listener, PlanExtra
from nanoengine.kv_offload.block_copier import BlockCopier
from nanoengine.kv_offload.disk_tier import DiskTier
from nanoengine.kv_offload.file_gate import FileGate
from nanoengine.kv_offload.file_thread import FileThread
from nanoengine.kv_offload.host_tier import HostTier
from nanoengine.kv_offload.kv_folder import KVFolder
from nanoengine.kv_offload.offload import Offload
from nanoengine.kv_offload.options import KVOffloadOptions, num_staged_blocks
from nanoengine.kv_offload.ram import available_ram


class Seams(Protocol):
    """Where it plugs in: lists that the engine is made of."""

    stores: list[KVStore]
    gates: list[Gate]
    extras: list[PlanExtra]
    listeners: list[Listener]
    hash_seed: int | None


def install(
    seams: Seams,
    options: KVOffloadOptions,
    pool: list[Tensor],
    fingerprint: str,
    *,
    enable_prefix_caching: bool = True,
) -> tuple[Offload, BlockCopier] | None:
    """Plug the store in; the second of the result is a part of the runner.

    Args:
        pool: the KV tensors, each with blocks in its first dimension.
        fingerprint: of everything that K/V depends on but tokens, as the name of a folder: the weights, the kernels, the dtype,
            the layout of a block. Used with a disk tier only.

    Raises:
        InvalidConfig: the options do not go together, or the folder cannot be used.
    """
    if not options.is_used:
        return None
    if not enable_prefix_caching:
        raise InvalidConfig(
            "enable_prefix_caching is False: blocks in host memory and on disk are found by their prefixes, so "
            "preemption_mode must be 'recompute', and kv_host_memory and kv_disk_path None"
        )
    block_bytes = sum(tensor[0].nbytes for tensor in pool)
    num_slots = options.num_host_blocks(block_bytes, available_ram())
    host = HostTier(num_slots) if num_slots else None
    disk, files = None, None
    if options.kv_disk_path is not None:
        try:
            folder = KVFolder(Path(options.kv_disk_path), fingerprint, block_bytes, options.kv_disk_bytes)
            seams.hash_seed = folder.seed()
        except (OSError, ValueError) as error:  # the second for what cannot be a path at all
            path = shown(options.kv_disk_path)
            raise InvalidConfig(f"kv_disk_path is {path}, which cannot be used: {error}") from error
        disk, files = DiskTier(folder.names, fingerprint, num_staged_blocks(block_bytes)), FileThread(folder)
    offload = Offload(host, disk)
    seams.stores.append(offload)
    seams.extras.append(offload)
    seams.listeners.append(offload)
    return offload, BlockCopier(pool, num_slots, files)


def attach(seams: Seams, offload: Offload, scheduler: Scheduler) -> None:
    """Have prompts wait for files. The lists of `seams` are those of the engine."""
    if offload.disk is not None:
        gate = FileGate(offload, offload.disk, scheduler)
        seams.gates.append(gate)
        seams.listeners.append(gate)
