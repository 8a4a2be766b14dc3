"""Offloading of K/V to host memory and disk, as a capability of the engine."""

from __future__ import annotations

from pathlib import Path

import xxhash

from nanoengine.core.capability import Capability
from nanoengine.core.errors import InvalidConfig, shown
from nanoengine.core.startup import Startup
from nanoengine.core.weights import weight_files
from nanoengine.features.kv_offload.block_copier import BlockCopier
from nanoengine.features.kv_offload.disk_index import DiskIndex
from nanoengine.features.kv_offload.file_gate import FileGate
from nanoengine.features.kv_offload.file_thread import FileThread
from nanoengine.features.kv_offload.host_tier import HostTier
from nanoengine.features.kv_offload.kv_folder import KVFolder
from nanoengine.features.kv_offload.offload import Offload
from nanoengine.features.kv_offload.options import STAGING_BLOCKS, STAGING_BYTES, KVOffloadOptions
from nanoengine.ram import available_ram


class KVOffload(Capability):
    """Offloading has three parts: a store of the block manager that adds orders to plans; a part of the runner that carries them
    out; with files, a gate of the scheduler. It reads the startup's `draft`, `weights_key`, and, of a model with states,
    `snapshots` and `state_keeper`.
    """

    options = KVOffloadOptions
    offload: Offload | None = None

    def policy(self, startup: Startup) -> None:
        options = startup.config.of(KVOffloadOptions)
        if not options.is_used:
            return
        if not startup.config.enable_prefix_caching:
            raise InvalidConfig(
                "enable_prefix_caching is False: blocks in host memory and on disk are looked up by their prefixes, so "
                "preemption_mode must be 'recompute', and kv_host_memory and kv_disk_path None"
            )
        pool = [tensor for layer in startup.runner.kv_cache.pool_layers for tensor in layer]
        block_bytes = sum(tensor[0].nbytes for tensor in pool)
        num_slots = options.num_host_blocks(block_bytes, available_ram())
        disk, files, keeper = None, None, startup.state_keeper
        num_pieces = 0 if keeper is None else keeper.pool.num_pieces
        if options.kv_disk_path is not None:
            folder, seed = _open_folder(options, fingerprint(startup), block_bytes)
            startup.blocks.seed = seed  # files are named after hashes
            most_staged = num_pieces + max(STAGING_BLOCKS, STAGING_BYTES // block_bytes)
            disk = DiskIndex(folder.names, folder.path.name, most_staged)
            files = FileThread(folder)
        offload = self.offload = Offload(HostTier(num_slots), disk, len(startup.blocks.layouts), num_pieces)
        parts = startup.runner.parts
        if keeper is None:
            parts.append(BlockCopier(pool, num_slots, files))
        else:  # snapshots are copied before they are overwritten, and states before their rows go on
            parts.insert(parts.index(keeper), BlockCopier(pool, num_slots, files, keeper.pool.pieces))
            startup.snapshots.keep_in(offload, num_pieces)
        startup.stores.append(offload)
        startup.parts.append(offload)
        observed = startup.metric_sources
        observed["offload"] = lambda: offload.stats
        if disk is not None:
            gate = FileGate(offload, disk, startup.blocks)
            observed["fetching"] = gate.fetching
            startup.parts.append(gate)

    def describe_itself(self, startup: Startup) -> str | None:
        if (offload := self.offload) is None:
            return None
        host = f"{offload.host.num_slots} blocks in host memory" if offload.host.num_slots else None
        disk = f"KV on disk: {startup.config.of(KVOffloadOptions).kv_disk_path}" if offload.disk else None
        return "; ".join(filter(None, (host, disk)))


def _open_folder(options: KVOffloadOptions, name: str, block_bytes: int) -> tuple[KVFolder, int]:
    """The folder, and the seed of the hashes that name its files."""
    path = options.kv_disk_path
    assert path is not None
    try:
        folder = KVFolder(Path(path), name, block_bytes, options.kv_disk_bytes)
        return folder, folder.seed()
    except (OSError, ValueError) as error:  # ValueError: the text is no path
        raise InvalidConfig(f"kv_disk_path is {shown(path)}, which cannot be used: {error}") from error


def fingerprint(startup: Startup) -> str:
    """A hash of everything that K/V depends on except tokens: the weights, their use, and the layout of a block. A draft model
    counts, too: its K/V lies in the same blocks.
    """
    models = [startup, *filter(None, [startup.draft])]
    used = [(each.model_config, each.backend.name, _weights(each, startup.max_model_len)) for each in models]
    kernels = startup.kernels.name, startup.kernels.fingerprint, getattr(startup.kernels, "quantized_products", "")
    stored = startup.dtype, startup.kv_dtype, startup.block_size, startup.groups
    return xxhash.xxh3_128_hexdigest(repr((used, kernels, stored)).encode())


def _weights(startup: Startup, max_len: int) -> object:
    """A key of the weights of a model and their use: that of `weights_key` for the longest sequence, or a digest of the files."""
    if (weights_key := startup.weights_key) is not None:
        return weights_key(max_len)
    digest = xxhash.xxh3_128()
    for path in weight_files(Path(startup.config.model)):
        with open(path, "rb") as file:
            while piece := file.read(1 << 24):
                digest.update(piece)
    return digest.hexdigest()
