"""Host memory and disk for blocks of K/V, as a capability of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from nanoengine.core.capability import Capability
from nanoengine.core.errors import InvalidConfig, shown
from nanoengine.core.ram import available_ram
from nanoengine.kv_offload.block_copier import BlockCopier
from nanoengine.kv_offload.disk_tier import DiskTier
from nanoengine.kv_offload.file_gate import FileGate
from nanoengine.kv_offload.file_thread import FileThread
from nanoengine.kv_offload.host_tier import HostTier
from nanoengine.kv_offload.kv_folder import KVFolder
from nanoengine.kv_offload.offload import Offload
from nanoengine.kv_offload.options import KVOffloadOptions, num_staged_blocks

if TYPE_CHECKING:
    from nanoengine.core.startup import Startup


class KVOffload(Capability):
    """One object that is a store of the block manager, adds orders to plans and listens; a part of the runner that carries them
    out; with files, a gate of the scheduler.
    """

    options = KVOffloadOptions
    offload: Offload | None = None
    seed: int | None = None

    def runner(self, startup: Startup) -> None:
        options = startup.config.of(KVOffloadOptions)
        if not options.is_used:
            return
        if not startup.config.enable_prefix_caching:
            raise InvalidConfig(
                "enable_prefix_caching is False: blocks in host memory and on disk are found by their prefixes, so "
                "preemption_mode must be 'recompute', and kv_host_memory and kv_disk_path None"
            )
        pool = [tensor for place in startup.runner.kv_cache.places for tensor in place]
        block_bytes = sum(tensor[0].nbytes for tensor in pool)
        num_slots = options.num_host_blocks(block_bytes, available_ram())
        disk, files = None, None
        if options.kv_disk_path is not None:
            folder = self._open_folder(options, fingerprint(startup), block_bytes)
            disk = DiskTier(folder.names, folder.path.name, num_staged_blocks(block_bytes))
            files = FileThread(folder)
        self.offload = Offload(HostTier(num_slots) if num_slots else None, disk)
        startup.stores.append(self.offload)
        startup.runner.parts.append(BlockCopier(pool, num_slots, files))

    def _open_folder(self, options: KVOffloadOptions, name: str, block_bytes: int) -> KVFolder:
        path = options.kv_disk_path
        assert path is not None
        try:
            folder = KVFolder(Path(path), name, block_bytes, options.kv_disk_bytes)
            self.seed = folder.seed()
        except (OSError, ValueError) as error:  # the second for what cannot be a path at all
            raise InvalidConfig(f"kv_disk_path is {shown(path)}, which cannot be used: {error}") from error
        return folder

    def policy(self, startup: Startup) -> None:
        if (offload := self.offload) is None:
            return
        startup.extras.append(offload)
        startup.listeners.append(offload)
        if offload.disk is not None:
            assert self.seed is not None
            startup.blocks.seed = self.seed  # files are named after hashes
            gate = FileGate(offload, offload.disk, startup.blocks)
            startup.gates.append(gate)
            startup.listeners.append(gate)

    def describe_itself(self, startup: Startup) -> str | None:
        if (offload := self.offload) is None:
            return None
        host = f"{offload.host.num_slots} blocks in host memory" if offload.host else None
        disk = f"KV on disk: {startup.config.of(KVOffloadOptions).kv_disk_path}" if offload.disk else None
        return "; ".join(filter(None, (host, disk)))


def fingerprint(startup: Startup) -> str:
    """A hash of all that K/V depends on but tokens: the weights, their use, and the layout of a block. Other capabilities add
    what they change of it as `startup.facts["kv_depends_on"]`: functions without arguments.
    """
    depends_on = [ask() for ask in startup.facts.get("kv_depends_on", ())] or [
        _hash_weights(Path(startup.config.model))
    ]
    kernels = startup.kernels.name, startup.kernels.fingerprint, getattr(startup.kernels, "quantized_products", "")
    stored = startup.dtype, startup.kv_dtype, startup.backend.name, startup.config.block_size, startup.groups
    return xxhash.xxh3_128_hexdigest(repr((startup.model_config, kernels, stored, depends_on)).encode())


def _hash_weights(folder: Path) -> str:
    digest = xxhash.xxh3_128()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            while piece := file.read(1 << 24):
                digest.update(piece)
    return digest.hexdigest()
