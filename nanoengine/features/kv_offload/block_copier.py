"""BlockCopier: copies blocks of K/V between the pool, host memory and files, as a plan orders.

Between the pool and host memory blocks move in the order of the steps. Files are read and written beside them (`file_thread.py`).
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from nanoengine.core.messages import StepPlan, StepResult
from nanoengine.core.model_runner import RunnerPart
from nanoengine.features.kv_offload.file_thread import FileThread
from nanoengine.features.kv_offload.messages import KV_OFFLOAD, Copy, FileOutcome, Location, OffloadOrders, Tier

logger = logging.getLogger("nanoengine")

STAGING = 64 << 20
"""Bytes of a GPU's memory through which blocks go to and from host memory; one block at least."""

PATIENCE = 0.01
"""Seconds that a step which computes nothing waits for a file to be read."""


class BlockCopier(RunnerPart):
    """The runner's part of offloading: host memory for blocks, the copies, and the contents of files that were read.

    The KV tensors have blocks in their first dimension, so a block is a row in each of them. In host memory and in files it is
    the bytes of these rows, one behind the other. Pieces of states are rows, too.

    Args:
        pool: the KV tensors, K and V of each layer of a group.
        num_slots: blocks of the host tier.
        files: None: there is no disk tier.
        states: a row for each piece of each slot of the state pool, of no more bytes than a block.

    Attributes:
        block_bytes: K/V of one block.
        host: [num_slots, block_bytes] uint8, whose pages are allocated as they are written. With a GPU they are page-locked in
            place, so that copies need no detour; torch would round page-locked memory up to a power of two.
        staged: contents of files, each [block_bytes] uint8, by name.
    """

    def __init__(self, pool: list[Tensor], num_slots: int, files: FileThread | None, states: Tensor | None = None):
        self.pool, self.files = pool, files
        self.pools = {Tier.POOL: pool, Tier.STATES: [] if states is None else [states]}
        self.device = pool[0].device
        self.block_bytes = sum(tensor[0].nbytes for tensor in pool)
        assert states is None or states[0].nbytes <= self.block_bytes
        size = num_slots * self.block_bytes
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.host = torch.frombuffer(memory, dtype=torch.uint8)[:size].view(num_slots, self.block_bytes)
        self.staged: dict[str, Tensor] = {}
        self._wanted: set[str] = set()  # names of files that sequences wait for
        self._answers: list[FileOutcome] = []  # without a read
        self._patience = 0.0
        self._unlock = _lock_pages(self, self.host) if self.device.type == "cuda" and num_slots else None

    # ---- RunnerPart

    def begin(self, plan: StepPlan) -> None:
        orders: OffloadOrders | None = plan.extras.get(KV_OFFLOAD)
        if orders is None:
            return
        if self.files is not None:
            self._begin_files(self.files, orders)
        self.copy(orders.copies, is_last=orders.is_last)
        if orders.wanted is not None:
            self._wanted = set(orders.wanted)
            self.staged = {name: block for name, block in self.staged.items() if name in self._wanted}

    def _begin_files(self, files: FileThread, orders: OffloadOrders) -> None:
        if orders.clears:
            files.clear()
            files.wait_until_idle()  # the reset is reported as done when no file is left
        for name in orders.deletes:
            files.delete(name)
        for name, header in orders.reads:
            self._wanted.add(name)
            if name in self.staged:
                self._answers.append(FileOutcome("read", name))
            else:
                files.read(name, header)
        self._patience = PATIENCE if orders.waits else 0.0

    def end(self, result: StepResult) -> None:
        if self.files is None:
            return
        answers, self._answers = self._answers, []
        for done in self.files.finished(self._patience):
            if done.content is not None and done.answer.name in self._wanted:
                self.staged[done.answer.name] = done.content
            answers.append(done.answer)
        self._patience = 0.0
        if answers:
            result.extras[KV_OFFLOAD] = answers

    def close(self) -> None:
        """Finish the writes, and free the host memory."""
        if self.files is not None:
            self.files.close()
        if self._unlock is not None:
            self._unlock()
        self.pool, self.pools, self.host = [], {}, self.host[:0]

    # ---- copies

    def copy(self, copies: list[Copy], *, is_last: bool = False) -> None:
        """Make copies with the result of one after the other; independent ones are made at once."""
        for batch in _batches(copies):
            sources, targets = [copy.source for copy in batch], [copy.target for copy in batch]
            if targets[0].tier is Tier.FILE:
                assert self.files is not None
                for source, target, header in batch:
                    read = self.host[int(source.key)].clone if source.tier is Tier.HOST else partial(self._read, source)
                    self.files.write(str(target.key), header, read, waits=is_last)
            else:
                count = max(1, STAGING // self.block_bytes)
                for start in range(0, len(batch), count):
                    piece = slice(start, start + count)
                    self._move(sources[piece], targets[piece])

    def _move(self, sources: list[Location], targets: list[Location]) -> None:
        """Blocks between a pool and memory of the host, through memory of the pool's device."""
        if targets[0].tier not in self.pools:
            for content, target in zip(self._gather(sources), targets, strict=True):
                self._on_host(target).copy_(content, non_blocking=True)
            return
        staging = torch.empty((len(sources), self.block_bytes), dtype=torch.uint8, device=self.device)
        for content, source in zip(staging, sources, strict=True):
            content.copy_(self._on_host(source), non_blocking=True)
        blocks = self._index(targets)
        for row, tensor in self._rows(staging, targets[0].tier):
            tensor.index_copy_(0, blocks, row)

    def _read(self, source: Location) -> Tensor:
        """A copy of a block of a pool, [block_bytes] uint8 on the CPU."""
        return self._gather([source])[0].cpu()

    def _gather(self, sources: list[Location]) -> Tensor:
        """Blocks of a pool, [n, block_bytes] uint8 on its device."""
        staging = torch.empty((len(sources), self.block_bytes), dtype=torch.uint8, device=self.device)
        blocks = self._index(sources)
        for row, tensor in self._rows(staging, sources[0].tier):
            row.copy_(tensor.index_select(0, blocks))
        if (size := sum(tensor[0].nbytes for tensor in self.pools[sources[0].tier])) < self.block_bytes:
            staging[:, size:] = 0
        return staging

    def _on_host(self, location: Location) -> Tensor:
        return self.host[int(location.key)] if location.tier is Tier.HOST else self.staged[str(location.key)]

    def _rows(self, memory: Tensor, tier: Tier) -> Iterator[tuple[Tensor, Tensor]]:
        """Memory for blocks, [n, block_bytes] uint8, as rows of each tensor of a pool."""
        start = 0
        for tensor in self.pools[tier]:
            end = start + tensor[0].nbytes
            yield memory[:, start:end].view(tensor.dtype).view(len(memory), *tensor.shape[1:]), tensor
            start = end

    def _index(self, locations: list[Location]) -> Tensor:
        """Indices of blocks in a pool, [n] int64 on its device, sent without waiting for the device."""
        indices, is_pinned = [int(location.key) for location in locations], self.device.type == "cuda"
        host = torch.tensor(indices, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
        return host.to(self.device, non_blocking=True)


def _batches(copies: list[Copy]) -> list[list[Copy]]:
    """Batches of copies from one tier to one tier, within which no copy reads or writes a location of another."""
    kinds = list(dict.fromkeys((copy.source.tier, copy.target.tier) for copy in copies))
    batches: dict[int, list[Copy]] = {}
    last: dict[Location, int] = {}  # the last batch with a location
    for copy in copies:
        number = max(last.get(copy.source, -1), last.get(copy.target, -1)) + 1
        number += (kinds.index((copy.source.tier, copy.target.tier)) - number) % len(kinds)
        last[copy.source] = last[copy.target] = number
        batches.setdefault(number, []).append(copy)
    return [batches[number] for number in sorted(batches)]


def _lock_pages(owner: BlockCopier, memory: Tensor) -> weakref.finalize[..., BlockCopier] | None:
    """Page-lock memory in place, until its owner is deleted or the result is called."""
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error:
        logger.warning("host memory could not be page-locked (CUDA error %d): copies are slower", error)
        return None
    return weakref.finalize(owner, _unlock_pages, memory)


def _unlock_pages(memory: Tensor) -> None:
    with suppress(RuntimeError):  # the interpreter is ending, and CUDA has ended before
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
