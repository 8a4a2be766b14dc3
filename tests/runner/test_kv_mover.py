"""Blocks on their way between the pool, host memory and files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.core.attention import KVLayer
from nanoengine.engine.kv.kv_file import BadKVFile, read_kv_file, write_kv_file
from nanoengine.engine.messages import FileDone, FileRead, FileWrite, Place, StepPlan, Tier, Transfer
from nanoengine.runner.kv_mover import KVMover

NUM_BLOCKS = 6
NUM_HOST_BLOCKS = 4
SHAPE = (3, 2, 4)  # of a block in one tensor
HEADER = b"header"


def make_mover(
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    block_major: bool = False,
    num_host_blocks: int = NUM_HOST_BLOCKS,
) -> KVMover:
    """A pool and host memory in which every block has content of its own.

    Args:
        block_major: all layers of a block lie side by side, so that no tensor of the pool is contiguous.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(num_blocks: int) -> Tensor:
        return torch.randn((num_blocks, *SHAPE), generator=generator).to(dtype)

    layers: list[KVLayer] = [(random(NUM_BLOCKS), random(NUM_BLOCKS)) for _ in range(2)]
    if block_major:
        pool = torch.stack([torch.stack(layer, dim=1) for layer in layers], dim=1)  # [blocks, layers, 2, ...]
        layers = [(pool[:, i, 0], pool[:, i, 1]) for i in range(2)]
    mover = KVMover(layers, num_host_blocks)
    mover.host.copy_(torch.randint(0, 256, mover.host.shape, generator=generator, dtype=torch.uint8))
    return mover


def device(block: int) -> Place:
    return Place(Tier.DEVICE, block)


def host(slot: int) -> Place:
    return Place(Tier.HOST, slot)


def content(mover: KVMover, place: Place) -> bytes:
    """What the mover has in a place."""
    if place.tier is Tier.HOST:
        return mover.host[int(place.where)].numpy().tobytes()
    rows = [tensor[int(place.where)].contiguous().view(torch.uint8) for tensor in mover.pool]
    return b"".join(row.numpy().tobytes() for row in rows)


def everything(mover: KVMover) -> list[bytes]:
    places = [*map(device, range(NUM_BLOCKS)), *map(host, range(len(mover.host)))]
    return [content(mover, place) for place in places]


def files(mover: KVMover, count: int) -> list[FileDone]:
    """What comes of so many reads and writes."""
    done: list[FileDone] = []
    while len(done) < count:
        done += mover.finished(wait=True)
    assert mover.finished(wait=True) == [], "nothing is left to wait for"
    return done


def write(path: Path, source: Place) -> FileWrite:
    return FileWrite(str(path), HEADER, source)


def read(path: Path, slot: int) -> FileRead:
    return FileRead(str(path), HEADER, slot)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
LAYOUTS = pytest.mark.parametrize("block_major", [False, True])


@DTYPES
@LAYOUTS
def test_to_host_memory_and_back_into_another_block(dtype: torch.dtype, block_major: bool) -> None:
    mover = make_mover(dtype, block_major=block_major)
    before = content(mover, device(2))
    mover.run([Transfer(device(2), host(3))])
    mover.pool[0][2] = 0
    mover.run([Transfer(host(3), device(5))])
    assert content(mover, device(5)) == before


@DTYPES
@LAYOUTS
def test_a_copy_within_the_pool_leaves_its_source_as_it_is(dtype: torch.dtype, block_major: bool) -> None:
    mover = make_mover(dtype, block_major=block_major)
    before = content(mover, device(1))
    mover.run([Transfer(device(1), device(4))])
    assert content(mover, device(4)) == before
    assert content(mover, device(1)) == before


def test_nothing_but_the_targets_changes() -> None:
    mover = make_mover()
    before = everything(mover)
    mover.run([Transfer(device(1), host(0)), Transfer(device(2), device(3))])
    changed = [a != b for a, b in zip(before, everything(mover), strict=True)]
    assert [i for i, is_changed in enumerate(changed) if is_changed] == [3, NUM_BLOCKS]


def test_no_transfers_change_nothing() -> None:
    mover = make_mover()
    before = everything(mover)
    mover.run([])
    assert everything(mover) == before


def test_the_bytes_of_a_block_are_those_of_all_its_rows() -> None:
    assert make_mover(torch.float32).block_bytes == 4 * 4 * 3 * 2 * 4
    assert make_mover(torch.bfloat16).block_bytes == 4 * 2 * 3 * 2 * 4


def test_host_memory_is_what_was_asked_for_and_no_more() -> None:
    mover = make_mover(num_host_blocks=5)
    assert mover.host.nbytes == mover.host.untyped_storage().nbytes() == 5 * mover.block_bytes


def test_measuring_the_rate_of_copies_leaves_the_pool_as_it_was() -> None:
    mover = make_mover()
    before = everything(mover)[:NUM_BLOCKS]
    assert mover.measure_copy_rate() > 0
    assert everything(mover)[:NUM_BLOCKS] == before
    assert make_mover(num_host_blocks=0).measure_copy_rate() == 0


def test_the_rate_is_that_of_whole_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks at once, there and back, on the way that plans go."""
    mover, runs = make_mover(), []
    monkeypatch.setattr(mover, "run", runs.append)
    mover.measure_copy_rate()
    for transfers in runs:
        tiers = [(transfer.source.tier, transfer.target.tier) for transfer in transfers]
        assert tiers == [(Tier.DEVICE, Tier.HOST)] * 4 + [(Tier.HOST, Tier.DEVICE)] * 4


# ---- order


def test_a_chain_carries_the_first_content_to_its_end() -> None:
    mover = make_mover()
    before = content(mover, device(0))
    mover.run([Transfer(device(0), device(1)), Transfer(device(1), device(2)), Transfer(device(2), device(3))])
    assert all(content(mover, device(block)) == before for block in (1, 2, 3))


def test_a_block_that_is_read_before_it_is_written_gives_its_old_content() -> None:
    mover = make_mover()
    first, second = content(mover, device(0)), content(mover, device(1))
    mover.run([Transfer(device(1), device(2)), Transfer(device(0), device(1))])
    assert content(mover, device(2)) == second
    assert content(mover, device(1)) == first


def test_the_last_of_several_that_write_to_one_place_wins() -> None:
    mover = make_mover()
    expected = content(mover, device(3))
    mover.run([Transfer(device(block), host(1)) for block in (1, 2, 3)])
    assert content(mover, host(1)) == expected


def test_a_slot_that_is_emptied_and_filled_again_in_one_plan() -> None:
    mover = make_mover()
    mover.run([Transfer(device(3), host(0))])
    old, new = content(mover, host(0)), content(mover, device(1))
    mover.run([Transfer(host(0), device(2)), Transfer(device(1), host(0))])
    assert content(mover, device(2)) == old
    assert content(mover, host(0)) == new


slots = st.one_of(
    st.tuples(st.just(Tier.DEVICE), st.integers(0, NUM_BLOCKS - 1)),
    st.tuples(st.just(Tier.HOST), st.integers(0, NUM_HOST_BLOCKS - 1)),
)


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs=st.lists(st.tuples(slots, slots), max_size=25), half=st.booleans(), block_major=st.booleans())
def test_any_transfers_are_as_if_done_one_by_one(
    pairs: list[tuple[tuple[Tier, int], tuple[Tier, int]]], half: bool, block_major: bool
) -> None:
    mover = make_mover(torch.bfloat16 if half else torch.float32, block_major=block_major)
    transfers = [Transfer(Place(*source), Place(*target)) for source, target in pairs]
    held = {Place(tier, i): content(mover, Place(tier, i)) for tier, i in places()}
    for transfer in transfers:
        held[transfer.target] = held[transfer.source]
    mover.run(transfers)
    assert {place: content(mover, place) for place in held} == held


def places() -> list[tuple[Tier, int]]:
    return [(Tier.DEVICE, i) for i in range(NUM_BLOCKS)] + [(Tier.HOST, i) for i in range(NUM_HOST_BLOCKS)]


# ---- files


@DTYPES
@LAYOUTS
@pytest.mark.parametrize("source", [device(2), host(1)])
def test_to_a_file_and_back_through_host_memory(
    source: Place, dtype: torch.dtype, block_major: bool, tmp_path: Path
) -> None:
    mover, other = (make_mover(dtype, seed, block_major=block_major) for seed in (0, 1))
    before = content(mover, source)
    mover.begin(StepPlan(writes=[write(tmp_path / "a", source)]))
    assert files(mover, 1) == [FileDone(str(tmp_path / "a"))]
    other.begin(StepPlan(reads=[read(tmp_path / "a", 3)]))
    assert files(other, 1) == [FileDone(str(tmp_path / "a"))]
    other.begin(StepPlan(transfers=[Transfer(host(3), device(5))]))
    assert content(other, device(5)) == content(other, host(3)) == before


def test_what_is_written_is_as_it_was_before_the_plan(tmp_path: Path) -> None:
    """Its block and its slot are given on in the same plan."""
    mover = make_mover()
    block, slot = content(mover, device(1)), content(mover, host(2))
    mover.begin(
        StepPlan(
            writes=[write(tmp_path / "block", device(1)), write(tmp_path / "slot", host(2))],
            transfers=[Transfer(device(4), host(2)), Transfer(host(0), device(1))],
        )
    )
    files(mover, 2)
    for name, expected in (("block", block), ("slot", slot)):
        found = bytearray(mover.block_bytes)
        read_kv_file(tmp_path / name, HEADER, memoryview(found))
        assert found == expected


def test_a_slot_is_written_to_a_file_before_another_one_is_read_into_it(tmp_path: Path) -> None:
    mover = make_mover()
    old, new = content(mover, host(2)), content(mover, host(1))
    mover.begin(StepPlan(writes=[write(tmp_path / "new", host(1))]))
    mover.begin(StepPlan(writes=[write(tmp_path / "old", host(2))], reads=[read(tmp_path / "new", 2)]))
    files(mover, 3)
    assert content(mover, host(2)) == new
    mover.begin(StepPlan(reads=[read(tmp_path / "old", 0)]))
    files(mover, 1)
    assert content(mover, host(0)) == old


def test_files_are_done_in_the_order_in_which_they_were_ordered(tmp_path: Path) -> None:
    mover = make_mover()
    paths = [tmp_path / str(i) for i in range(20)]
    for i, path in enumerate(paths):
        mover.begin(StepPlan(writes=[write(path, host(i % 4))]))
    for i, path in enumerate(paths):
        mover.begin(StepPlan(reads=[read(path, i % 4)], deletes=[str(path)]))
    assert [done.path for done in files(mover, 40)] == [str(path) for path in paths] * 2
    mover.close()
    assert os.listdir(tmp_path) == []


def test_a_file_is_deleted_before_it_is_written_anew(tmp_path: Path) -> None:
    mover = make_mover()
    path = tmp_path / "a"
    mover.begin(StepPlan(writes=[write(path, host(0))]))
    mover.begin(StepPlan(deletes=[str(path), str(tmp_path / "none")], writes=[write(path, host(1))]))
    assert [done.problem for done in files(mover, 2)] == [None, None]
    assert content(mover, host(1)) in path.read_bytes()


def test_a_read_that_is_under_way_is_not_begun_again(tmp_path: Path) -> None:
    """Nor one that is done, before anybody was told of it."""
    mover = make_mover()
    plan = StepPlan(reads=[read(tmp_path / "none", 0)])
    mover.begin(plan)
    mover.close()
    mover.begin(plan)
    assert len(files(mover, 1)) == 1


@pytest.mark.parametrize("damage", ["missing", "cut", "altered", "longer", "other header", "other size"])
def test_a_file_that_is_not_what_it_should_be_is_a_problem_and_nothing_else(damage: str, tmp_path: Path) -> None:
    mover, path = make_mover(), tmp_path / "a"
    mover.begin(StepPlan(writes=[write(path, device(1))]))
    files(mover, 1)
    sound = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "other header":
        write_kv_file(path, b"HEADER", bytes(mover.block_bytes))
    elif damage == "other size":
        write_kv_file(path, HEADER, bytes(mover.block_bytes - 4))
    else:
        damaged = {
            "cut": sound[:-20],
            "altered": sound[:50] + bytes([sound[50] ^ 1]) + sound[51:],
            "longer": sound + b"x",
        }
        path.write_bytes(damaged[damage])
    before = everything(mover)
    mover.begin(StepPlan(reads=[read(path, 3)], transfers=[Transfer(device(1), host(0))]))
    [done] = files(mover, 1)
    assert done.path == str(path)
    assert done.problem
    after = everything(mover)
    assert after[: NUM_BLOCKS + 3] == [*before[:NUM_BLOCKS], before[1], *before[NUM_BLOCKS + 1 : NUM_BLOCKS + 3]]


def test_a_file_that_cannot_be_written_is_a_problem_of_its_own(tmp_path: Path) -> None:
    mover = make_mover()
    orders = [write(tmp_path / "no folder" / "a", device(1)), write(tmp_path / "b", device(1))]
    mover.begin(StepPlan(writes=orders))
    first, second = files(mover, 2)
    assert (first.path, bool(first.problem)) == (orders[0].path, True)
    assert second == FileDone(orders[1].path)


def test_a_block_that_cannot_be_set_aside_is_a_problem_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover = make_mover()
    before = content(mover, device(1))

    def fail(*_: object, **__: object) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", fail)
    mover.begin(StepPlan(writes=[write(tmp_path / "a", device(1))], transfers=[Transfer(device(1), host(0))]))
    [done] = files(mover, 1)
    assert "out of memory" in (done.problem or "")
    assert content(mover, host(0)) == before


def test_transfers_that_fail_lose_no_answer(tmp_path: Path) -> None:
    mover = make_mover()
    with pytest.raises(IndexError):
        mover.begin(StepPlan(writes=[write(tmp_path / "a", device(1))], transfers=[Transfer(device(99), host(0))]))
    assert files(mover, 1) == [FileDone(str(tmp_path / "a"))]


def test_what_waits_to_be_written_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoengine.runner.kv_files.MAX_UNWRITTEN", 1)
    mover = make_mover()
    mover.begin(StepPlan(writes=[write(tmp_path / str(i), host(i % 4)) for i in range(20)]))
    assert mover._files._num_unwritten <= mover.block_bytes
    assert len(files(mover, 20)) == 20


def test_closing_finishes_what_is_to_be_written(tmp_path: Path) -> None:
    mover = make_mover()
    mover.begin(StepPlan(writes=[write(tmp_path / str(i), host(i % 4)) for i in range(20)]))
    mover.close()
    assert len(os.listdir(tmp_path)) == 20
    mover.close()


# ---- a process that is killed

WRITER = """
import sys
from tests.runner.test_kv_mover import *
mover = make_mover()
for round in range(10**6):
    for i in range(40):
        mover.host[i % 4].fill_(i)
        mover.begin(StepPlan(writes=[FileWrite(f"{sys.argv[1]}/{i}.kv", b"header", host(i % 4))]))
    if round == 0:
        files(mover, 40)
    print(round, flush=True)
"""


@pytest.mark.parametrize("num_rounds", [1, 2, 5])
def test_a_process_killed_while_it_writes_leaves_whole_files_and_damage_is_never_served(
    num_rounds: int, tmp_path: Path
) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    for _ in range(num_rounds):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    names = os.listdir(tmp_path)
    assert all(name.endswith((".kv", ".tmp")) for name in names)
    whole = sorted(name for name in names if name.endswith(".kv"))
    assert len(whole) == 40

    size = len((tmp_path / whole[0]).read_bytes())
    for i, name in enumerate(whole):
        path = tmp_path / name
        if i % 3 == 1:
            os.truncate(path, (i * 37) % size)
        elif i % 3 == 2:
            data = bytearray(path.read_bytes())
            data[(i * 53) % size] ^= 1 << i % 8
            path.write_bytes(data)
    mover = make_mover(seed=1)
    for i, name in enumerate(whole):
        mover.begin(StepPlan(reads=[read(tmp_path / name, 0)]))
        [done] = files(mover, 1)
        assert (done.problem is None) == (i % 3 == 0)
        if done.problem is None:
            assert content(mover, host(0)) == bytes([int(name.removesuffix(".kv"))]) * mover.block_bytes


def test_a_bad_file_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(BadKVFile, match="cannot be read"):
        read_kv_file(tmp_path / "none", HEADER, memoryview(bytearray(4)))
