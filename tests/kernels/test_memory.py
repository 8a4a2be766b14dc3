"""Large tensors of zeros."""

from __future__ import annotations

import errno
import gc
import mmap
from collections.abc import Sequence

import pytest
import torch

from nanoengine.kernels.memory import CHUNK_BYTES, HUGE_PAGE, Arena, zeros_in_huge_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("shape", [(1,), (2, 3, 4, 5), [7, 1000, 1001], (0,), (4, 0, 2)])
def test_it_is_a_tensor_of_zeros(shape: Sequence[int], dtype: torch.dtype) -> None:
    tensor = zeros_in_huge_pages(shape, dtype)
    assert tensor.shape == torch.Size(shape)
    assert tensor.dtype == dtype
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    assert not tensor.any()


def test_a_view_keeps_the_memory() -> None:
    views = [zeros_in_huge_pages((1 << 20,), torch.float32)[10:20].fill_(i) for i in range(20)]
    gc.collect()
    for i, view in enumerate(views):
        assert (view == i).all()


def test_memory_is_taken_when_it_is_written() -> None:
    """More than most machines have, as a pool that grows into its memory; the system may refuse so much."""
    try:
        tensor = zeros_in_huge_pages((8 << 30,), torch.bfloat16)
    except OSError:
        pytest.skip("this machine does not lend so much memory")
    tensor[-1] = 1.0
    assert tensor[-1] == 1.0
    assert tensor[0] == 0.0


@pytest.mark.parametrize("exponent", [50, 60, 61, 62, 70])
def test_more_than_there_can_be_is_an_os_error(exponent: int) -> None:
    with pytest.raises(OSError):
        zeros_in_huge_pages((1 << exponent,), torch.float32)


def test_a_system_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class SmallPages(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", SmallPages)
    tensor = zeros_in_huge_pages((5, 1000), torch.float32)
    assert tensor.shape == (5, 1000)
    assert not tensor.any()


# ---- arenas


def test_tensors_of_an_arena_lie_side_by_side_from_a_huge_page_on() -> None:
    """However small they are; each begins a cache line, and shares nothing."""
    arena, sizes = Arena(), (1, 64, 100, 5000)
    tensors = [arena.zeros(size).fill_(i + 1) for i, size in enumerate(sizes)]
    assert [len(tensor) for tensor in tensors] == list(sizes)
    assert tensors[0].data_ptr() % HUGE_PAGE == 0
    assert [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors] == [0, 64, 128, 256]
    assert all((tensor == i + 1).all() for i, tensor in enumerate(tensors))


def test_what_does_not_fit_begins_a_chunk_and_may_be_larger_than_one() -> None:
    arena = Arena()
    first = arena.zeros(CHUNK_BYTES - 64)
    for size in (1000, CHUNK_BYTES + HUGE_PAGE):
        tensor = arena.zeros(size)
        assert len(tensor) == size
        assert tensor.data_ptr() % HUGE_PAGE == 0
        tensor[-1] = 1
    assert first[-1] == 0
