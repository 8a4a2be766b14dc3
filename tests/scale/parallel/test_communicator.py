"""What the ranks of a group gather, in shared memory and by torch.distributed."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoengine.kernels.native.support import unsupported_reason
from nanoengine.scale.parallel.communicator import Distributed, SharedMemory
from nanoengine.scale.worker.member import Member, RankLost
from tests.scale.parallel.groups import by_all

REASON = unsupported_reason(torch.device("cpu"), torch.float32)
needs_native = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")


def group(size: int, row_bytes: int = 1 << 20, seconds: float = 30.0) -> list[SharedMemory]:
    memory = torch.zeros(SharedMemory.bytes_of(size, row_bytes), dtype=torch.uint8)
    return [SharedMemory(memory, rank, size, row_bytes, seconds) for rank in range(size)]


def parts(rng: random.Random, size: int) -> tuple[list[int], list[Tensor]]:
    """A step's part of each rank: some have none; some are larger than a slot."""
    rows = rng.choice([1, 1, 2, 5, 40, 700])
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.int64])
    widths = [rng.choice([0, 1, 3, 17, 64, 1100]) for _ in range(size)]
    widths[rng.randrange(size)] = 900  # of 700 rows, more bytes than a slot has
    return widths, [torch.randn(rows, width).mul(99).to(dtype) for width in widths]


@needs_native
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_ranks_have_all_parts_side_by_side(size: int) -> None:
    rng = random.Random(size)
    torch.manual_seed(size)
    gathers = [parts(rng, size) for _ in range(60)]
    ranks = group(size)

    def work(rank: SharedMemory) -> list[Tensor]:
        own = random.Random(rank.rank)
        found = []
        for widths, each in gathers:
            if own.random() < 0.1:
                time.sleep(0.004)  # longer than others spin
            found.append(rank.gather(each[rank.rank], widths))
        rank.check()
        return found

    for found in by_all(ranks, work):
        for got, (_, each) in zip(found, gathers, strict=True):
            assert torch.equal(got, torch.cat(each, dim=1))


@needs_native
def test_a_part_with_gaps_between_its_rows() -> None:
    part = torch.arange(24.0).view(4, 6)[:, 1:3]
    found = by_all(group(2), lambda rank: rank.gather(part, [2, 2]))
    assert torch.equal(found[0], torch.cat((part, part), dim=1))


@needs_native
def test_a_rank_that_does_not_come_is_named_within_the_limit() -> None:
    ranks = group(3, seconds=0.3)
    start = time.monotonic()

    def work(rank: SharedMemory) -> str:
        if rank.rank == 2:
            return ""
        rank.gather(torch.ones(1, 1), [1, 1, 1])
        rank.gather(torch.ones(1, 1), [1, 1, 1])  # of which it knows at once that it is in vain
        with pytest.raises(RankLost) as caught:
            rank.check()
        return str(caught.value)

    found = by_all(ranks, work)
    assert time.monotonic() - start < 1.3
    assert found[0] == "rank 2 of 3 did not come to rank 0 within worker_step_seconds=0.3"


@needs_native
def test_processes_share_a_file_without_a_name() -> None:
    memory = os.memfd_create("test")
    try:
        ranks = [SharedMemory.of_member(Member(rank, 2, memory, 9.0), 8) for rank in range(2)]
        found = by_all(ranks, lambda rank: rank.gather(torch.full((2, 3), rank.rank), [3, 3]))
        assert found[0].tolist() == found[1].tolist() == [[0, 0, 0, 1, 1, 1]] * 2
    finally:
        os.close(memory)


def gather_by_gloo(member: Member, sent: Any) -> None:
    rank = Distributed(member, "gloo", torch.device("cpu"))
    widths = [3, 0, 5]
    found = rank.gather(torch.full((4, widths[member.rank]), float(member.rank)), widths)
    rank.check()
    sent.put((member.rank, found.tolist()))


def test_torch_distributed_gathers_parts_of_different_widths() -> None:
    """In NCCL's place: gloo, which has the same functions."""
    context = multiprocessing.get_context("fork")
    memory, sent = os.memfd_create("test"), context.Queue()
    processes = [
        context.Process(target=gather_by_gloo, args=(Member(rank, 3, memory, 30.0), sent)) for rank in range(3)
    ]
    for process in processes:
        process.start()
    os.close(memory)
    try:
        found = dict(sent.get(timeout=60) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    assert found == {rank: [[0.0] * 3 + [2.0] * 5] * 4 for rank in range(3)}
