"""KVMover: carries blocks of K/V between the pool, host memory and files, as a plan says.

Between the pool and host memory blocks move in the order of the steps. Files are read and written beside them (`kv_files.py`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import suppress
from time import perf_counter

import torch
from torch import Tensor

from nanoengine.core.attention import KVLayer
from nanoengine.engine.messages import FileDone, FileWrite, Place, StepPlan, Tier, Transfer
from nanoengine.kernels.memory import zeros_in_huge_pages
from nanoengine.runner.kv_files import KVFiles

logger = logging.getLogger("nanoengine")

STAGING = 64 << 20
"""Bytes of a GPU's memory through which blocks go to and from host memory; one block at least."""

MEASURED_BLOCKS = 8
"""Blocks that move at once while the rate of copies is measured."""


class KVMover:
    """Host memory for `num_host_blocks` blocks, the copies, and the files.

    A backend's KV tensors have blocks in their first dimension, so a block is a row in each of them. In host memory and in
    files it is the bytes of these rows, one behind the other.

    Args:
        places: K and V of every place for a layer in a block.
        num_host_blocks: slots of the host tier.

    Attributes:
        block_bytes: K/V of one block.
        host: [num_host_blocks, block_bytes] uint8. With a GPU it is page-locked where it lies, so that copies need no detour;
            torch's own page-locked memory would be rounded up to a power of two.
    """

    def __init__(self, places: list[KVLayer], num_host_blocks: int):
        self.pool: list[Tensor] = [tensor for place in places for tensor in place]
        self.device = self.pool[0].device
        self.block_bytes = sum(tensor[0].nbytes for tensor in self.pool)
        self.host = zeros_in_huge_pages((num_host_blocks, self.block_bytes), torch.uint8)
        self._host_rows = self._rows(self.host)
        self._files = KVFiles()
        self._unlock = _lock_pages(self, self.host) if self.device.type == "cuda" and num_host_blocks else None

    # ---- a plan

    def begin(self, plan: StepPlan) -> None:
        """Do the transfers of a plan, and have its files read, deleted and written. Called in the order of the steps.

        What is to be written is as it was before the plan: it is set aside before anything moves. A slot that a file is read into
        may be one of those that are written.
        """
        slots = {Place(Tier.HOST, read.slot) for read in plan.reads}
        aside = {order.path: self._set_aside(order) for order in plan.writes if order.source in slots}
        for read in plan.reads:
            self._files.read(read, self.host[read.slot].numpy().data)
        for path in plan.deletes:
            self._files.delete(path)
        for order in plan.writes:
            if order.path not in aside:
                self._files.wait_for_room(self.block_bytes)
            content = aside[order.path] if order.path in aside else self._set_aside(order)
            if isinstance(content, Tensor):
                self._files.write(order, content.numpy().data)
            else:
                self._files.refuse(order, content)
        self.run(plan.transfers)

    def _set_aside(self, order: FileWrite) -> Tensor | RuntimeError:
        """A copy of a block, [block_bytes] uint8 on the CPU, or why there is none."""
        try:
            if order.source.tier is Tier.HOST:
                return self.host[int(order.source.where)].clone()
            block = torch.empty((1, self.block_bytes), dtype=torch.uint8, device=self.device)
            for row, tensor in zip(self._rows(block), self.pool, strict=True):
                row[0] = tensor[int(order.source.where)]
            return block[0].cpu()
        except RuntimeError as error:  # out of memory: only the file is lost
            return error

    def finished(self, wait: bool = False) -> list[FileDone]:
        """The reads and writes that are over since the last call. Each is told once, whatever becomes of its plan.

        Args:
            wait: until there is one, unless there is none to wait for.
        """
        return self._files.finished(wait)

    def close(self) -> None:
        """Finish what is to be written, and give the host memory back."""
        self._files.close()
        if self._unlock is not None:
            self._unlock()

    # ---- transfers

    def run(self, transfers: list[Transfer]) -> None:
        """Do all transfers, in their order."""
        for group in _groups(transfers):
            source, target = group[0].source.tier, group[0].target.tier
            rows_from = [int(transfer.source.where) for transfer in group]
            rows_to = [int(transfer.target.where) for transfer in group]
            if source is target or self.device.type == "cpu":
                pieces = zip(self._tensors(source), self._tensors(target), strict=True)
                index_from, index_to = _index(rows_from, self.device), _index(rows_to, self.device)
                for tensor_from, tensor_to in pieces:
                    tensor_to[index_to] = tensor_from[index_from]
                continue
            count = max(1, STAGING // self.block_bytes)
            for start in range(0, len(group), count):
                piece = slice(start, start + count)
                if target is Tier.HOST:
                    self._to_host(rows_from[piece], rows_to[piece])
                else:
                    self._from_host(rows_from[piece], rows_to[piece])

    def _to_host(self, blocks: list[int], slots: list[int]) -> None:
        staging = torch.empty((len(blocks), self.block_bytes), dtype=torch.uint8, device=self.device)
        index = _index(blocks, self.device)
        for rows, tensor in zip(self._rows(staging), self.pool, strict=True):
            rows.copy_(tensor[index])
        for content, slot in zip(staging, slots, strict=True):
            self.host[slot].copy_(content, non_blocking=True)

    def _from_host(self, slots: list[int], blocks: list[int]) -> None:
        staging = torch.empty((len(blocks), self.block_bytes), dtype=torch.uint8, device=self.device)
        for content, slot in zip(staging, slots, strict=True):
            content.copy_(self.host[slot], non_blocking=True)
        index = _index(blocks, self.device)
        for rows, tensor in zip(self._rows(staging), self.pool, strict=True):
            tensor[index] = rows

    def _tensors(self, tier: Tier) -> list[Tensor]:
        return self.pool if tier is Tier.DEVICE else self._host_rows

    def _rows(self, memory: Tensor) -> list[Tensor]:
        """Memory for blocks, [n, block_bytes] uint8, as tensors like those of the pool."""
        rows, start = [], 0
        for tensor in self.pool:
            size = tensor[0].nbytes
            row = memory[:, start : start + size].view(tensor.dtype)
            rows.append(row.view(len(memory), *tensor.shape[1:]))
            start += size
        return rows

    def measure_copy_rate(self) -> float:
        """Bytes per second between the pool and host memory: some blocks there and back, as a plan moves them.

        The blocks are as before then, the slots not: nothing is cached yet.
        """
        count = min(MEASURED_BLOCKS, len(self.host), len(self.pool[0]))
        if not count:
            return 0.0
        down = [Transfer(Place(Tier.DEVICE, i), Place(Tier.HOST, i)) for i in range(count)]
        transfers = down + [Transfer(target, source) for source, target in down]
        self.run(transfers)  # memory is taken when it is first written
        self._wait()
        start = perf_counter()
        self.run(transfers)
        self._wait()
        return len(transfers) * self.block_bytes / max(perf_counter() - start, 1e-9)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _lock_pages(owner: KVMover, memory: Tensor) -> weakref.finalize:
    """Lock memory where it lies, until its owner is gone or the result is called."""
    cudart = torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error:
        logger.warning("host memory could not be page-locked (CUDA error %d): copies are slower", error)
    return weakref.finalize(owner, _unlock_pages, memory, locked=not error)


def _unlock_pages(memory: Tensor, locked: bool) -> None:
    if locked:
        with suppress(RuntimeError):  # the interpreter is ending, and CUDA has gone before
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _index(rows: list[int], device: torch.device) -> Tensor:
    """Where blocks are in a tensor, sent to its device without waiting for what that is doing."""
    host = torch.tensor(rows, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _groups(transfers: list[Transfer]) -> Iterator[list[Transfer]]:
    """Runs of transfers that can be done at once: between the same tiers, and none touches what another one writes."""
    group: list[Transfer] = []
    written: set[Place] = set()
    for transfer in transfers:
        if group and (
            (transfer.source.tier, transfer.target.tier) != (group[0].source.tier, group[0].target.tier)
            or transfer.source in written
            or transfer.target in written
        ):
            yield group
            group, written = [], set()
        group.append(transfer)
        written.add(transfer.target)
    if group:
        yield group
