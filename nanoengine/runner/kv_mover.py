"""KVMover: carries blocks of K/V between the pool, host memory and files, as a batch's transfers say."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from nanoengine.attention.backend import KVLayer
from nanoengine.engine.kv.kv_file import BadKVFile, read_kv_file, write_kv_file
from nanoengine.engine.messages import Place, Tier, Transfer

logger = logging.getLogger("nanoengine")


class KVMover:
    """Host memory for `num_host_blocks` blocks, and the copies.

    A backend's KV tensors have blocks in their first dimension, so a block is a row in each of them.

    Args:
        layers: K and V of every layer of the pool.
        num_host_blocks: slots of the host tier.
    """

    def __init__(self, layers: list[KVLayer], num_host_blocks: int):
        self.pool: list[Tensor] = [tensor for layer in layers for tensor in layer]
        pinned = self.pool[0].device.type == "cuda"  # copies from and to pinned memory need no detour
        self.host: list[Tensor] = [
            torch.empty((num_host_blocks, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=pinned)
            for tensor in self.pool
        ]

    @property
    def block_bytes(self) -> int:
        return sum(tensor[0].nbytes for tensor in self.pool)

    def run(self, transfers: list[Transfer]) -> list[str]:
        """Do all transfers, in their order; returns the files that could not be written, which is no reason to fail.

        Raises:
            BadKVFile: a file was damaged after the scheduler had found it sound.
        """
        unwritten: list[str] = []
        for group in _groups(transfers):
            tiers = group[0].source.tier, group[0].target.tier
            if Tier.DISK in tiers:
                unwritten += self._move_file(group[0])
                continue
            sources, targets = self._tensors(tiers[0]), self._tensors(tiers[1])
            rows_from = _rows([transfer.source for transfer in group], sources[0])
            rows_to = _rows([transfer.target for transfer in group], targets[0])
            for source, target in zip(sources, targets, strict=True):
                target[rows_to] = source[rows_from].to(target.device)
        return unwritten

    def _tensors(self, tier: Tier) -> list[Tensor]:
        return self.pool if tier is Tier.DEVICE else self.host

    def _move_file(self, transfer: Transfer) -> list[str]:
        (from_tier, from_where), (to_tier, to_where) = transfer.source, transfer.target
        if to_tier is Tier.DISK:
            rows = [tensor[int(from_where)].cpu().contiguous().view(torch.uint8) for tensor in self._tensors(from_tier)]
            payload = b"".join(row.numpy().tobytes() for row in rows)
            try:
                write_kv_file(Path(str(to_where)), transfer.header, payload)
            except OSError as error:
                logger.warning("not written: %s", error)
                return [str(to_where)]
            return []
        _, content = read_kv_file(Path(str(from_where)))
        if len(content) != self.block_bytes:
            raise BadKVFile(f"{from_where} holds {len(content)} bytes of K/V, not {self.block_bytes}")
        everything = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        start = 0
        for tensor in self._tensors(to_tier):
            row = tensor[int(to_where)]
            piece = everything[start : start + row.nbytes]
            row.copy_(piece.view(tensor.dtype).view(row.shape))
            start += row.nbytes
        return []

    def measure_copy_rate(self) -> float:
        """Bytes per second between the pool and host memory, by copying one block there several times."""
        row = [tensor[:1].cpu() for tensor in self.pool]  # warm-up
        start = perf_counter()
        for _ in range(3):
            for tensor, copy in zip(self.pool, row, strict=True):
                copy.copy_(tensor[:1])
        return 3 * self.block_bytes / max(perf_counter() - start, 1e-9)


def _rows(places: list[Place], tensor: Tensor) -> Tensor:
    """Where blocks are in a tensor, sent to its device without waiting for what that is doing."""
    host = torch.tensor([place.where for place in places], pin_memory=tensor.device.type == "cuda")
    return host.to(tensor.device, non_blocking=True)


def _groups(transfers: list[Transfer]) -> Iterator[list[Transfer]]:
    """Runs of transfers that can be done at once: between the same tiers, and none touches what another one writes."""
    group: list[Transfer] = []
    written: set[object] = set()
    for transfer in transfers:
        if group and (
            Tier.DISK in (transfer.source.tier, transfer.target.tier)
            or (transfer.source.tier, transfer.target.tier) != (group[0].source.tier, group[0].target.tier)
            or transfer.source in written
            or transfer.target in written
        ):
            yield group
            group, written = [], set()
        group.append(transfer)
        written.add(transfer.target)
    if group:
        yield group
