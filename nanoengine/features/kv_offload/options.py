"""Options of offloading, and the host memory that follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.errors import InvalidConfig
from nanoengine.core.options import check, option
from nanoengine.sizes import format_bytes

HOST_FRACTION, HOST_CAP = 0.25, 4 << 30
"""Default size of the host tier: a fraction of the available RAM, and most bytes."""

STAGING_BYTES, STAGING_BLOCKS = 256 << 20, 16
"""Most memory for files that were read and wait for free blocks of the pool; but at least so many blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVOffloadOptions:
    """Options of the lower tiers of the KV cache, for blocks that are evicted from the pool.

    Args:
        preemption_mode: the blocks of a preempted sequence stay in the prefix cache until they are evicted. "recompute": then
            they are lost, and computed again when it resumes. "swap": then they are copied to host memory, and back from there.
        kv_host_memory: bytes of host memory for blocks, or as "2GiB". None: a quarter of the available RAM, at most 4 GiB, with
            preemption_mode "swap"; otherwise none.
        kv_disk_path: a folder for blocks that are evicted from the pool and from host memory, and for all cached blocks when
            the engine is closed; a later engine with the same model reads them. None: no such folder.
        kv_disk_bytes: capacity of that folder for this model, in bytes or as "20GiB"; the least recently used files are deleted
            first.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    preemption_mode: str = option("recompute", choices=("recompute", "swap"))
    kv_host_memory: int | None = option(None, high=2**50, unit="bytes")
    kv_disk_path: str | None = None
    kv_disk_bytes: int = option(16 << 30, high=2**60, unit="bytes")

    def __post_init__(self) -> None:
        check(self)
        if self.kv_disk_path == "":
            raise InvalidConfig("kv_disk_path is '': it must be the path of a folder, or None")

    @property
    def has_host_tier(self) -> bool:
        return self.kv_host_memory is not None or self.preemption_mode != "recompute"

    @property
    def is_used(self) -> bool:
        return self.has_host_tier or self.kv_disk_path is not None

    def num_host_blocks(self, block_bytes: int, available: int) -> int:
        """Blocks of the host tier; 0: there is none.

        Args:
            block_bytes: K/V of one block.
            available: bytes of RAM that this process can still allocate.

        Raises:
            InvalidConfig: the memory is less than one block, or more than there is.
        """
        if not self.has_host_tier:
            return 0
        memory = self.kv_host_memory
        if memory is None:
            memory = int(min(HOST_CAP, HOST_FRACTION * available))
        elif memory > available:
            raise InvalidConfig(
                f"kv_host_memory is {format_bytes(memory)}, but {format_bytes(available)} of RAM are available: lower it"
            )
        if memory < block_bytes:
            raise InvalidConfig(
                f"kv_host_memory is {format_bytes(memory)}, and one block of the KV cache has {format_bytes(block_bytes)}:"
                " raise kv_host_memory, lower block_size, or leave host memory out with preemption_mode='recompute'"
            )
        return memory // block_bytes
