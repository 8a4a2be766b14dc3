"""Communicators: all-gather among the ranks of a group. All ranks must make the same calls in the same order."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from nanoengine.kernels.native.addresses import address
from nanoengine.kernels.native.c_functions import c_functions
from nanoengine.scale.worker.member import Member, RankLost

PAGE = 4096
SEAT_BYTES = 128
"""The same constant as in gather.cpp."""
LEAST_SLOT_BYTES = 1 << 20


class SharedMemory:
    """Shared memory of ranks, which are processes of one machine or threads of one process (gather.cpp). Steps with such calls
    can be recorded.

    Args:
        memory: [bytes_of(size, row_bytes)] uint8, zeros at first.
        row_bytes: of the widest row of a part.
        seconds: limit of the wait for another rank.
    """

    def __init__(self, memory: Tensor, rank: int, size: int, row_bytes: int, seconds: float):
        self.rank, self.size, self.seconds = rank, size, seconds
        self.memory, self.slot_bytes = memory, _slot_bytes(row_bytes)
        self.c: SimpleNamespace = c_functions()
        self._widths: dict[tuple[int, ...], Tensor] = {}

    @staticmethod
    def bytes_of(size: int, row_bytes: int) -> int:
        return -(-size * SEAT_BYTES // PAGE) * PAGE + 2 * size * _slot_bytes(row_bytes)

    @classmethod
    def of_member(cls, member: Member, row_bytes: int) -> SharedMemory:
        """In the memory of the group's file, which the first process of the group extends with zeros."""
        num_bytes = cls.bytes_of(member.size, row_bytes)
        os.ftruncate(member.memory, num_bytes)
        memory = torch.frombuffer(mmap.mmap(member.memory, num_bytes), dtype=torch.uint8)
        return cls(memory, member.rank, member.size, row_bytes, member.step_seconds)

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """The parts of all ranks, side by side: [n, widths[rank]] -> [n, sum of widths]."""
        part = part.contiguous()
        out, size = part.new_empty(len(part), sum(widths)), len(part) * widths[self.rank]
        seat = self.memory.data_ptr(), self.rank, self.size, self.slot_bytes, self.seconds
        source = self._in_bytes(widths, part.itemsize), address(part, part.dtype, size)
        self.c.gather(*seat, *source, out.data_ptr(), len(part))
        return out

    def check(self) -> None:
        """Called at the end of a step.

        Raises:
            RankLost: a rank did not arrive in time, so the results of the step are of no use.
        """
        lost = self.c.lost_rank(self.memory.data_ptr(), self.rank)
        if lost >= 0:
            raise RankLost(
                f"rank {lost} of {self.size} did not come to rank {self.rank} within worker_step_seconds={self.seconds}"
            )

    def _in_bytes(self, widths: Sequence[int], itemsize: int) -> int:
        """Address of the widths in bytes, for the kernel; it stays valid for recorded steps."""
        key = (*widths, itemsize)
        if key not in self._widths:
            self._widths[key] = torch.tensor(widths, dtype=torch.int64, device="cpu") * itemsize
        return self._widths[key].data_ptr()


class Distributed:
    """torch.distributed among ranks: NCCL between GPUs. CUDA graphs can record its calls after the first one.

    Args:
        member: rank of this process, and size of the group.
        backend: of torch.distributed.
        device: of the tensors.
    """

    def __init__(self, member: Member, backend: str, device: torch.device):
        self.rank, self.size = member.rank, member.size
        store = dist.FileStore(f"/proc/self/fd/{member.memory}", member.size)
        limit = timedelta(seconds=member.step_seconds)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=limit)
        self.gather(torch.zeros(1, 1, dtype=torch.float32, device=device), [1] * self.size)

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """As `SharedMemory.gather`."""
        widest = max(widths)
        padded = part if part.shape[1] == widest else torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        parts = padded.new_empty(self.size, *padded.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), padded.contiguous())
        return torch.cat([parts[rank, :, :width] for rank, width in enumerate(widths)], dim=1)

    def check(self) -> None:
        """Nothing: the library raises by itself."""


Communicator = SharedMemory | Distributed


def _slot_bytes(row_bytes: int) -> int:
    return -(-max(LEAST_SLOT_BYTES, row_bytes) // PAGE) * PAGE
