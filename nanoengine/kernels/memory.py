"""Large memory on the CPU."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of mallopt(3)."""

KEPT_BYTES = 512 << 20
"""Freed memory that stays with the process."""

LARGEST_REUSED = 32 << 20
"""Largest allocation that comes from it; glibc takes no higher value."""

CACHE_LINE, HUGE_PAGE, CHUNK_BYTES = 64, 2 << 20, 64 << 20
"""Of an arena: tensors begin a line, chunks a huge page."""


def keep_freed_memory() -> None:
    """Let the C library keep what it frees: a step's tensors otherwise go back to the system, and come again page by page.

    It holds for the whole process, and does nothing but on Linux with glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_REUSED)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def zeros_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros on the CPU, in huge pages where the system has them. The system allocates it at the first write.

    Reading it from end to end is a few per cent faster than in small pages, and the first writes are much faster.

    Raises:
        OSError: the system has not so much memory.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(*shape, dtype=dtype, device="cpu")
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OverflowError as error:
        raise OSError(f"{size} bytes are more than there can be") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


class Arena:
    """Memory for many tensors that live about as long as each other, side by side in huge pages.

    Linux gives no huge page to a mapping of less than one, nor to what lies before the first that begins in it. Each tensor keeps
    the chunk that it is cut from.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8, device="cpu")

    def zeros(self, size: int) -> Tensor:
        """[size] uint8, from a multiple of 64 bytes on. Memory is allocated by the system when it is first written.

        Raises:
            OSError: the system has not so much memory.
        """
        room = -(-size // CACHE_LINE) * CACHE_LINE
        if room > len(self._free):
            size_of_chunk = max(room, CHUNK_BYTES)
            chunk = zeros_in_huge_pages([size_of_chunk + HUGE_PAGE], torch.uint8)
            self._free = chunk[-chunk.data_ptr() % HUGE_PAGE :][:size_of_chunk]
        piece, self._free = self._free[:size], self._free[room:]
        return piece
