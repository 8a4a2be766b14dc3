"""Blocks on their way between the pool, host memory and files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.attention.backend import KVLayer
from nanoengine.engine.kv.kv_file import BadKVFile, read_kv_file, write_kv_file
from nanoengine.engine.messages import Place, Tier, Transfer
from nanoengine.runner.kv_mover import KVMover

NUM_BLOCKS = 6
NUM_HOST_BLOCKS = 4
SHAPE = (3, 2, 4)  # of a block in one tensor
Content = list[Tensor]


def make_mover(dtype: torch.dtype = torch.float32, seed: int = 0, *, block_major: bool = False) -> KVMover:
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
    mover = KVMover(layers, NUM_HOST_BLOCKS)
    for tensor in mover.host:
        tensor.copy_(random(NUM_HOST_BLOCKS))
    return mover


def device(block: int) -> Place:
    return Place(Tier.DEVICE, block)


def host(slot: int) -> Place:
    return Place(Tier.HOST, slot)


def disk(path: Path) -> Place:
    return Place(Tier.DISK, str(path))


def content(mover: KVMover, place: Place) -> Content:
    """What the mover has in a place of a tier with tensors."""
    tensors = mover.pool if place.tier is Tier.DEVICE else mover.host
    return [tensor[int(place.where)].clone() for tensor in tensors]


def same(a: Content, b: Content) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def everything(mover: KVMover) -> list[Content]:
    places = [*map(device, range(NUM_BLOCKS)), *map(host, range(NUM_HOST_BLOCKS))]
    return [content(mover, place) for place in places]


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
    assert same(content(mover, device(5)), before)
    assert content(mover, device(5))[0].dtype == dtype


@DTYPES
@LAYOUTS
def test_a_copy_within_the_pool_leaves_its_source_as_it_is(dtype: torch.dtype, block_major: bool) -> None:
    mover = make_mover(dtype, block_major=block_major)
    before = content(mover, device(1))
    mover.run([Transfer(device(1), device(4))])
    assert same(content(mover, device(4)), before)
    assert same(content(mover, device(1)), before)


@DTYPES
@LAYOUTS
def test_to_a_file_and_back(dtype: torch.dtype, block_major: bool, tmp_path: Path) -> None:
    mover = make_mover(dtype, block_major=block_major)
    before = content(mover, device(1))
    mover.run([Transfer(device(1), disk(tmp_path / "a"), b"{}")])
    mover.run([Transfer(disk(tmp_path / "a"), device(3))])
    assert same(content(mover, device(3)), before)


@DTYPES
@LAYOUTS
def test_from_host_memory_to_a_file_that_another_mover_reads(
    dtype: torch.dtype, block_major: bool, tmp_path: Path
) -> None:
    mover, other = (make_mover(dtype, seed, block_major=block_major) for seed in (0, 1))
    before = content(mover, host(2))
    mover.run([Transfer(host(2), disk(tmp_path / "a"), b"{}")])
    other.run([Transfer(disk(tmp_path / "a"), device(0))])
    assert same(content(other, device(0)), before)


def test_nothing_but_the_targets_changes() -> None:
    mover = make_mover()
    before = everything(mover)
    mover.run([Transfer(device(1), host(0)), Transfer(device(2), device(3))])
    changed = [not same(a, b) for a, b in zip(before, everything(mover), strict=True)]
    assert [i for i, is_changed in enumerate(changed) if is_changed] == [3, NUM_BLOCKS]


def test_no_transfers_change_nothing() -> None:
    mover = make_mover()
    before = everything(mover)
    mover.run([])
    assert all(map(same, before, everything(mover)))


def test_a_file_says_what_it_holds(tmp_path: Path) -> None:
    mover = make_mover()
    mover.run([Transfer(device(1), disk(tmp_path / "a"), b'{"tokens": "abc"}')])
    header, payload = read_kv_file(tmp_path / "a")
    assert header == {"tokens": "abc"}
    assert len(payload) == mover.block_bytes


def test_the_bytes_of_a_block_are_those_of_all_its_rows() -> None:
    assert make_mover(torch.float32).block_bytes == 4 * 4 * 3 * 2 * 4
    assert make_mover(torch.bfloat16).block_bytes == 4 * 2 * 3 * 2 * 4


# ---- order


def test_a_chain_carries_the_first_content_to_its_end() -> None:
    mover = make_mover()
    before = content(mover, device(0))
    mover.run([Transfer(device(0), device(1)), Transfer(device(1), device(2)), Transfer(device(2), device(3))])
    assert all(same(content(mover, device(block)), before) for block in (1, 2, 3))


def test_a_block_that_is_read_before_it_is_written_gives_its_old_content() -> None:
    mover = make_mover()
    first, second = content(mover, device(0)), content(mover, device(1))
    mover.run([Transfer(device(1), device(2)), Transfer(device(0), device(1))])
    assert same(content(mover, device(2)), second)
    assert same(content(mover, device(1)), first)


def test_the_last_of_several_that_write_to_one_place_wins() -> None:
    mover = make_mover()
    expected = content(mover, device(3))
    mover.run([Transfer(device(block), host(1)) for block in (1, 2, 3)])
    assert same(content(mover, host(1)), expected)


def test_a_slot_that_is_emptied_and_filled_again_in_one_batch() -> None:
    mover = make_mover()
    old, new = content(mover, host(0)), content(mover, device(1))
    mover.run([Transfer(host(0), device(2)), Transfer(device(1), host(0))])
    assert same(content(mover, device(2)), old)
    assert same(content(mover, host(0)), new)


def test_a_slot_that_moves_to_a_file_before_it_is_used_again(tmp_path: Path) -> None:
    mover = make_mover()
    old, new = content(mover, host(0)), content(mover, device(1))
    path = disk(tmp_path / "a")
    mover.run([Transfer(host(0), path, b"{}"), Transfer(device(1), host(0)), Transfer(path, device(4))])
    assert same(content(mover, device(4)), old)
    assert same(content(mover, host(0)), new)


# ---- bad files


def test_a_file_of_another_size_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    mover = make_mover()
    before = everything(mover)
    write_kv_file(tmp_path / "a", b"{}", bytes(mover.block_bytes - 4))
    with pytest.raises(BadKVFile, match=str(mover.block_bytes)):
        mover.run([Transfer(disk(tmp_path / "a"), device(1))])
    assert all(map(same, before, everything(mover)))


@pytest.mark.parametrize("damage", ["missing", "truncated", "altered"])
def test_a_file_that_was_damaged_is_refused(tmp_path: Path, damage: str) -> None:
    mover = make_mover()
    path = tmp_path / "a"
    mover.run([Transfer(device(1), disk(path), b"{}")])
    sound = path.read_bytes()
    damaged = {"truncated": sound[:-20], "altered": sound[:50] + bytes([sound[50] ^ 1]) + sound[51:]}
    path.unlink()
    if damage in damaged:
        path.write_bytes(damaged[damage])
    with pytest.raises(BadKVFile):
        mover.run([Transfer(disk(path), device(2))])


def test_measuring_the_rate_of_copies_changes_nothing() -> None:
    mover = make_mover()
    before = everything(mover)
    assert mover.measure_copy_rate() > 0
    assert all(map(same, before, everything(mover)))


# ---- any list of transfers

FILES = ("f0", "f1")
slots = st.one_of(
    st.tuples(st.just(Tier.DEVICE), st.integers(0, NUM_BLOCKS - 1)),
    st.tuples(st.just(Tier.HOST), st.integers(0, NUM_HOST_BLOCKS - 1)),
)
places = st.one_of(slots, slots, st.tuples(st.just(Tier.DISK), st.sampled_from(FILES)))


def one_by_one(mover: KVMover, transfers: list[Transfer]) -> tuple[list[Content], dict[Place, Content]]:
    """What every place holds after the transfers, each done before the next."""
    held: dict[Place, Content] = {}
    for tier, count in ((Tier.DEVICE, NUM_BLOCKS), (Tier.HOST, NUM_HOST_BLOCKS)):
        held |= {Place(tier, i): content(mover, Place(tier, i)) for i in range(count)}
    for transfer in transfers:
        held[transfer.target] = held[transfer.source]
    files = {place: held.pop(place) for place in list(held) if place.tier is Tier.DISK}
    return list(held.values()), files


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs=st.lists(st.tuples(places, places), max_size=25), half=st.booleans(), block_major=st.booleans())
def test_any_transfers_are_as_if_done_one_by_one(
    pairs: list[tuple[tuple[Tier, int | str], tuple[Tier, int | str]]], half: bool, block_major: bool
) -> None:
    mover = make_mover(torch.bfloat16 if half else torch.float32, block_major=block_major)
    with tempfile.TemporaryDirectory() as folder:
        known: set[str] = set()
        transfers = []
        for pair in pairs:
            source, target = (Place(tier, f"{folder}/{where}" if tier is Tier.DISK else where) for tier, where in pair)
            if source.tier is Tier.DISK and (str(source.where) not in known or target.tier is Tier.DISK):
                continue  # no such file yet; and nothing is ever copied from file to file
            if target.tier is Tier.DISK:
                known.add(str(target.where))
            transfers.append(Transfer(source, target, b"{}"))
        expected, files = one_by_one(mover, transfers)
        mover.run(transfers)
        assert all(map(same, everything(mover), expected))
        for place, held in files.items():
            mover.run([Transfer(place, device(0))])
            assert same(content(mover, device(0)), held)
