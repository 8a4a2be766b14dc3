"""Blocks on their way between the pool, host memory and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.core.messages import StepPlan, StepResult
from nanoengine.features.kv_offload.block_copier import BlockCopier
from nanoengine.features.kv_offload.file_thread import FileThread
from nanoengine.features.kv_offload.kv_folder import KVFolder
from nanoengine.features.kv_offload.messages import (
    KV_OFFLOAD,
    Copy,
    FileOutcome,
    FileRead,
    Location,
    OffloadOrders,
    Tier,
)

NUM_BLOCKS, NUM_SLOTS = 6, 4
SHAPE = (3, 2, 4)  # of a block in one tensor
HEADER = b"header"
NAMES = [f"{number:032x}-0" for number in range(40)]


def make_copier(
    folder: Path | None = None, dtype: torch.dtype = torch.float32, seed: int = 0, *, block_major: bool = False
) -> BlockCopier:
    """A pool and host memory in which every block has content of its own.

    Args:
        block_major: all layers of a block lie side by side, so that no tensor of the pool is contiguous.
    """
    generator = torch.Generator().manual_seed(seed)
    pool = [torch.randn((NUM_BLOCKS, *SHAPE), generator=generator).to(dtype) for _ in range(4)]
    if block_major:
        stacked = torch.stack(pool, dim=1)
        pool = [stacked[:, i] for i in range(4)]
    block_bytes = sum(tensor[0].nbytes for tensor in pool)
    files = None if folder is None else FileThread(KVFolder(folder, "model", block_bytes, 1 << 30))
    copier = BlockCopier(pool, NUM_SLOTS, files)
    copier.host.copy_(torch.randint(0, 256, copier.host.shape, generator=generator, dtype=torch.uint8))
    return copier


def block(number: int) -> Location:
    return Location(Tier.POOL, number)


def slot(number: int) -> Location:
    return Location(Tier.HOST, number)


def file(number: int) -> Location:
    return Location(Tier.FILE, NAMES[number])


def content(copier: BlockCopier, place: Location) -> bytes:
    if place.tier is Tier.HOST:
        return copier.host[int(place.key)].numpy().tobytes()
    if place.tier is Tier.FILE:
        return copier.staged[str(place.key)].numpy().tobytes()
    rows = [tensor[int(place.key)].contiguous().view(torch.uint8) for tensor in copier.pool]
    return b"".join(row.numpy().tobytes() for row in rows)


def carry_out(copier: BlockCopier, *copies: Copy, num_answers: int = 0, **orders: object) -> list[FileOutcome]:
    """A step with these orders, and so many answers."""
    copier.begin(StepPlan(extras={KV_OFFLOAD: OffloadOrders(list(copies), **orders)}))  # type: ignore[arg-type]
    return answers(copier, num_answers)


def answers(copier: BlockCopier, count: int) -> list[FileOutcome]:
    found: list[FileOutcome] = []
    while len(found) < count:
        copier._patience = 5.0
        copier.end(result := StepResult([]))
        found += result.extras[KV_OFFLOAD]
    assert len(found) == count
    return found


PLACES = [*map(block, range(NUM_BLOCKS)), *map(slot, range(NUM_SLOTS))]
pairs = st.tuples(st.sampled_from(PLACES), st.sampled_from(PLACES)).filter(lambda pair: pair[0].tier != pair[1].tier)


@settings(max_examples=60)
@given(st.lists(pairs, max_size=25), st.booleans(), st.booleans(), st.booleans())
def test_copies_are_made_as_if_one_after_the_other(
    made: list[tuple[Location, Location]], half: bool, block_major: bool, is_staged_small: bool
) -> None:
    copier = make_copier(None, torch.bfloat16 if half else torch.float32, block_major=block_major)
    held = {place: content(copier, place) for place in PLACES}
    for source, target in made:
        held[target] = held[source]
    with pytest.MonkeyPatch.context() as patch:
        if is_staged_small:
            patch.setattr("nanoengine.features.kv_offload.block_copier.STAGING", 1)
        copier.copy([Copy(*pair) for pair in made])
    assert {place: content(copier, place) for place in PLACES} == held


def test_evictions_and_loads_that_take_turns_are_two_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So they come from an admission: a block is evicted, then its room is filled from another slot."""
    copier, batches = make_copier(), []
    monkeypatch.setattr(copier, "_move", lambda sources, targets: batches.append((sources, targets)))
    copier.copy([Copy(block(1), slot(0)), Copy(slot(2), block(1)), Copy(block(2), slot(1)), Copy(slot(3), block(2))])
    assert batches == [([block(1), block(2)], [slot(0), slot(1)]), ([slot(2), slot(3)], [block(1), block(2)])]


@pytest.mark.parametrize("source", [block(2), slot(1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_to_a_file_and_back_into_another_pool(source: Location, dtype: torch.dtype, tmp_path: Path) -> None:
    copier = make_copier(tmp_path, dtype)
    before = content(copier, source)
    written = carry_out(copier, Copy(source, file(0), HEADER), num_answers=1)
    assert written == [FileOutcome("written", NAMES[0])]
    other = make_copier(tmp_path, dtype, seed=1)
    assert other.files is not None
    assert other.files.folder.names == NAMES[:1]
    assert carry_out(other, reads=[FileRead(NAMES[0], HEADER)], num_answers=1) == [FileOutcome("read", NAMES[0])]
    carry_out(other, Copy(file(0), block(5)), wanted=[])
    assert content(other, block(5)) == before
    assert not other.staged, "its memory was given back"
    for each in (copier, other):
        each.close()


def test_what_is_written_is_the_block_at_its_place_among_the_copies(tmp_path: Path) -> None:
    copier = make_copier(tmp_path)
    first, second, third = (content(copier, place) for place in (slot(0), block(1), slot(3)))
    copies = [Copy(slot(0), file(0), HEADER), Copy(block(1), slot(0)), Copy(slot(0), file(1), HEADER)]
    carry_out(copier, *copies, Copy(slot(3), block(1)), Copy(block(1), file(2), HEADER), num_answers=3)
    carry_out(copier, reads=[FileRead(NAMES[number], HEADER) for number in range(3)], num_answers=3)
    assert [content(copier, file(number)) for number in range(3)] == [first, second, third]
    copier.close()


def test_a_file_that_was_read_is_not_read_again_while_it_is_kept(tmp_path: Path) -> None:
    """Its answer may have been lost with Ctrl-C."""
    copier = make_copier(tmp_path)
    carry_out(copier, Copy(block(1), file(0), HEADER), num_answers=1)
    read = FileRead(NAMES[0], HEADER)
    carry_out(copier, reads=[read], num_answers=1)
    (tmp_path / "model" / f"{NAMES[0]}.kv").unlink()
    assert carry_out(copier, reads=[read], num_answers=1) == [FileOutcome("read", NAMES[0])]
    carry_out(copier, wanted=[])
    [answer] = carry_out(copier, reads=[read], num_answers=1)
    assert answer.problem
    carry_out(copier, reads=[read], wanted=[])
    [answer] = answers(copier, 1)
    assert not copier.staged, "nobody wants it any more"
    copier.close()


def test_files_are_deleted_before_they_are_written_anew(tmp_path: Path) -> None:
    copier = make_copier(tmp_path)
    carry_out(copier, Copy(block(1), file(0), HEADER), Copy(block(2), file(1), HEADER), num_answers=2)
    carry_out(copier, Copy(block(3), file(0), HEADER), deletes=[NAMES[0], NAMES[7]], num_answers=1)
    carry_out(copier, reads=[FileRead(NAMES[0], HEADER)], num_answers=1)
    assert content(copier, file(0)) == content(copier, block(3))
    carry_out(copier, clears=True)
    assert not list((tmp_path / "model").glob("*.kv")), "at once"
    copier.close()


def test_what_waits_to_be_written_is_bounded_and_the_last_orders_wait_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoengine.features.kv_offload.file_thread.MAX_UNWRITTEN", 1)
    copier = make_copier(tmp_path)
    copies = [Copy(slot(i % 4), file(i), HEADER) for i in range(20)]
    found = carry_out(copier, *copies, num_answers=20)
    assert {answer.problem for answer in found} == {None, "refused"}
    assert not any(answer.problem for answer in carry_out(copier, *copies, is_last=True, num_answers=20))
    carry_out(copier, *(Copy(slot(i % 4), file(i), HEADER) for i in range(40)), is_last=True)
    copier.close()
    assert len(list((tmp_path / "model").glob("*.kv"))) == 40, "closing finishes what is to be written"


def test_a_block_that_cannot_be_set_aside_is_a_problem_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = make_copier(tmp_path)

    def fail(*_: object) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(copier, "_read", fail)
    [answer] = carry_out(copier, Copy(block(1), file(0), HEADER), num_answers=1)
    assert "out of memory" in (answer.problem or "")
    copier.close()


def test_host_memory_is_taken_as_it_is_written() -> None:
    before = num_pages()
    copier = BlockCopier([torch.zeros(1, 1 << 20)], 1 << 9, None)
    assert copier.host.nbytes == 2 << 30
    assert num_pages() - before < 20_000, "of the 524,288 of 2 GiB"


def num_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])
