"""Hand cases of host memory and files that drawing does not reach, or does not name."""

from __future__ import annotations

import random
from typing import Any

import pytest

from nanoengine.core.errors import InvalidConfig
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.sequence import Phase, Request
from nanoengine.features.kv_offload.disk_index import DiskIndex
from nanoengine.features.kv_offload.host_tier import HostTier
from nanoengine.features.kv_offload.messages import FileOutcome, Location, OffloadOrders, Tier
from nanoengine.features.kv_offload.offload import Offload
from nanoengine.features.kv_offload.options import KVOffloadOptions
from tests.core.toys import make_engine, run
from tests.features.kv_offload.toys import Files, HybridToy, OffloadToy, check_offload, offload_engine

FILED = [9, 1, 4, 8, 2] * 5
"""A prompt whose blocks are in files."""


def params(max_tokens: int = 4, seed: int = 1) -> CoreSamplingParams:
    return CoreSamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)


def finish(engine: LLMEngine, offload: Offload, *requests: Request) -> None:
    for request in requests:
        engine.submit(request)
    for _ in range(1000):
        if not engine.has_unfinished:
            return
        engine.step()
        check_offload(engine, offload)
    raise AssertionError("the engine does not come to an end")


def right(prompt: list[int], max_tokens: int = 4, seed: int = 1) -> list[int]:
    engine = make_engine(num_blocks=400)
    run(engine, [request := engine.make_request(prompt, params(max_tokens, seed))])
    return request.sequences[0].output_token_ids


def behind_files(**options: Any) -> tuple[LLMEngine, Offload, OffloadToy]:
    """An engine that finds `FILED` in files; they are done when a test says so."""
    model = OffloadToy(Files(), random.Random(0))
    engine, offload = offload_engine(model, num_blocks=100, max_staged=40)
    finish(engine, offload, engine.make_request(FILED, params()))
    engine.close()
    assert len(model.files) == 7
    later = OffloadToy(model.files, random.Random(0))
    later._do = lambda job: later.jobs.appendleft(job)  # type: ignore[method-assign]
    later.rng.random = lambda: 1.0  # type: ignore[method-assign]
    engine, offload = offload_engine(later, **{"num_blocks": 100, "max_staged": 40} | options)
    return engine, offload, later


def let_files_come(model: OffloadToy) -> None:
    model._do = OffloadToy._do.__get__(model)  # type: ignore[method-assign]
    model.rng.random = lambda: 0.3  # type: ignore[method-assign]
    model.is_quick = True


# ---- swapping


def test_a_write_of_a_step_that_failed_is_ordered_again() -> None:
    model = OffloadToy(Files(), random.Random(0))
    engine, offload = offload_engine(model, num_blocks=8, max_staged=40)
    finish(engine, offload, request := engine.make_request([1] * 20, params(1)))
    model.failing, model.rng.random = {model.num_launched + 1}, lambda: 0.0  # type: ignore[method-assign]
    finish(engine, offload, engine.make_request([2] * 20, params(1)))
    assert not model.files, "the step did not get as far as its orders"
    finish(engine, offload, engine.make_request([1] * 20, params(1)))
    engine.close()
    assert {f"{hash.hex()}-0" for hash, _ in request.sequences[0].block_hashes} <= set(model.files)


@pytest.mark.parametrize("tiers", [{"num_slots": 2, "max_staged": 40}, {"num_slots": 30}])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", [OffloadToy, HybridToy])
def test_wrong_kv_is_forgotten_in_every_tier(kind: type[OffloadToy], depth: int, tiers: dict[str, int]) -> None:
    """A prompt whose last token breaks it takes its prefix, and states, out of the pools, host memory and files."""
    files, prompt = Files(), [*FILED, 33]
    model = kind(files, random.Random(0), broken=[(33, 25)])
    model.is_quick = True
    engine, offload = offload_engine(model, num_blocks=12, depth=depth, num_snapshots=1, **tiers)
    finish(engine, offload, engine.make_request(FILED, params(1)))
    finish(engine, offload, *[engine.make_request([number] * 40, params(1)) for number in range(2)])
    before = {f"{hash.hex()}-{group}" for group, hash in offload.host.entries}
    before |= offload.disk.files if offload.disk else set()
    hashes = engine.make_request(FILED, params(1))
    finish(engine, offload, broken := engine.make_request(prompt, params(4)))
    assert "NotFiniteLogits" in repr(broken.error)
    groups = [*offload.groups, *offload.state_groups]
    own = {f"{hash.hex()}-{group}" for hash, _ in broken.sequences[0].block_hashes for group in groups}
    assert {name[-1] for name in own & before} == {str(group) for group in groups}
    after = {f"{hash.hex()}-{group}" for group, hash in (*offload.host.entries, *offload.in_pool)}
    assert not own & (after | (offload.disk.files if offload.disk else set()))
    finish(engine, offload, hashes)
    assert hashes.output().num_cached_tokens == 0
    assert hashes.sequences[0].output_token_ids == right(FILED, 1)


# ---- files


@pytest.mark.parametrize(("max_staged", "num_cached"), [(40, 24), (4, 16)])
def test_while_one_waits_for_files_those_behind_it_run(max_staged: int, num_cached: int) -> None:
    """With little memory for files, the first blocks are read. Newcomers do not wait either, and a reset forgets all."""
    engine, offload, model = behind_files(max_staged=max_staged)
    filed, other = engine.make_request(FILED, params()), engine.make_request([7] * 5, params(9))
    for request in (filed, other):
        engine.submit(request)
    for _ in range(5):
        engine.step()
        check_offload(engine, offload)
    assert filed.sequences[0].phase is Phase.WAITING
    assert len(other.sequences[0].output_token_ids) == 5
    engine.submit(newcomer := engine.make_request([8] * 5, params(2)))
    engine.step()
    engine.step()
    assert newcomer.finished
    let_files_come(model)
    finish(engine, offload)
    assert filed.output().num_cached_tokens == num_cached
    assert filed.sequences[0].output_token_ids == right(FILED)
    assert not model.staged, "their memory was given back"
    assert model.files
    assert engine.reset_prefix_cache()
    assert not model.files
    finish(engine, offload, again := engine.make_request(FILED, params()))
    assert again.output().num_cached_tokens == 0


def test_files_are_asked_for_before_a_row_is_free() -> None:
    engine, offload, model = behind_files(max_num_seqs=1)
    engine.submit(engine.make_request([7] * 5, params(30)))
    engine.step()
    engine.submit(filed := engine.make_request(FILED, params()))
    engine.step()
    assert len(model.jobs) == 6
    let_files_come(model)
    engine.step()
    engine.step()
    assert len(model.staged) == 6
    assert not filed.sequences[0].block_tables
    finish(engine, offload)
    assert filed.output().num_cached_tokens == 24


def test_what_one_waits_for_another_shares() -> None:
    engine, offload, model = behind_files(max_staged=6)
    requests = [engine.make_request(FILED, params(seed=seed)) for seed in range(3)]
    for request in requests:
        engine.submit(request)
    engine.step()
    assert len(model.jobs) == 6
    engine.abort(requests[0].request_id)
    check_offload(engine, offload)
    let_files_come(model)
    finish(engine, offload)
    assert [request.output().num_cached_tokens for request in requests[1:]] == [24, 24]
    assert offload.stats.num_loaded_files == 6


def test_where_all_is_written_when_the_engine_ends_beginnings_are_written_last() -> None:
    model = OffloadToy(Files(), random.Random(0), most_files=3)
    engine, offload = offload_engine(model, num_blocks=100, max_staged=40)
    finish(engine, offload, request := engine.make_request(FILED, params()))
    engine.close()
    assert list(model.files) == [f"{hash.hex()}-0" for hash, _ in request.sequences[0].block_hashes[2::-1]]


def test_an_engine_without_files_makes_no_step_for_nothing() -> None:
    model = OffloadToy(Files(), random.Random(0))
    engine, _ = offload_engine(model, num_blocks=20, num_slots=5)
    assert engine.step() == []
    assert engine.reset_prefix_cache()
    engine.close()
    assert model.num_launched == 0


# ---- options


def test_host_memory_follows_from_the_options_and_what_is_less_than_a_block_is_an_error() -> None:
    assert KVOffloadOptions().num_host_blocks(100, 10000) == 0
    assert KVOffloadOptions(preemption_mode="swap").num_host_blocks(100, 10000) == 25
    assert KVOffloadOptions(preemption_mode="swap", kv_host_memory=999).num_host_blocks(100, 10000) == 9
    for options in ({"preemption_mode": "swap", "kv_host_memory": 99}, {"kv_host_memory": 99}):
        with pytest.raises(InvalidConfig, match=r"99 bytes, and one block .* has 100"):
            KVOffloadOptions(**options).num_host_blocks(100, 10000)
    with pytest.raises(InvalidConfig, match=r"kv_host_memory is 19\.531 KiB, but 9.766 KiB"):
        KVOffloadOptions(kv_host_memory=20000).num_host_blocks(100, 10000)


def test_what_a_failed_step_was_to_delete_and_read_the_next_one_does() -> None:
    disk, failed, orders = DiskIndex(["1" * 32 + "-0"], "model", 5), OffloadOrders(), OffloadOrders()
    disk.want(failed, (0, b"\x11" * 16), b"tokens")
    disk.invalidate(failed, (0, b"\x22" * 16))
    disk.step_failed(failed, orders)
    assert (orders.reads, orders.deletes, orders.clears) == (failed.reads, ["22" * 16 + "-0"], False)
    key = 0, b"\x33" * 16
    disk.save(failed, key, b"tokens", Location(Tier.POOL, 1))
    disk.invalidate(failed, key)
    disk.answer(FileOutcome("written", disk.name(key)))
    assert disk.name(key) not in disk.files
    disk.clear(failed)
    assert not failed.copies
    disk.step_failed(failed, orders)
    assert orders.clears
    assert not orders.reads


def test_a_file_that_was_deleted_to_make_room_is_written_again() -> None:
    disk, orders, key = DiskIndex([], "model", 5), OffloadOrders(), (0, b"\x11" * 16)
    for answer, num_writes in ((None, 1), (None, 1), ("written", 1), ("gone", 2)):
        if answer is not None:
            disk.answer(FileOutcome(answer, disk.name(key)))
        disk.save(orders, key, b"tokens", Location(Tier.POOL, 1))
        assert len(orders.copies) == num_writes


def test_what_is_not_copied_for_certain_or_is_held_is_not_pushed_out() -> None:
    host = HostTier(3)
    entries = [host.put((0, bytes([number])), b"tokens", 1) for number in range(3)]
    assert host.oldest() is None
    for entry in entries[1:]:
        entry.is_copied = True
    host.held.add((0, b"\x01"))
    assert host.oldest() == (0, b"\x02")
    host.held.clear()
    assert host.oldest() == (0, b"\x01")
    host.use((0, b"\x01"))
    assert host.oldest() == (0, b"\x02"), "a hit makes it the newest"


def test_a_file_that_was_read_is_for_its_tokens_alone() -> None:
    disk, orders, key = DiskIndex(["11" * 16 + "-0"], "model", 5), OffloadOrders(), (0, b"\x11" * 16)
    disk.want(orders, key, b"tokens")
    assert not disk.has(key, b"tokens")
    disk.answer(FileOutcome("read", disk.name(key)))
    assert disk.has(key, b"tokens")
    assert not disk.has(key, b"others")
