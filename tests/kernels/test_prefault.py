"""Memory that is taken while the engine is idle."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import threading
import time
import weakref

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.core.messages import Entries, StepPlan, StepResult
from nanoengine.kernels import prefault
from nanoengine.kernels.kv_cache import BlockMajorKVCache
from nanoengine.kernels.memory import HUGE_PAGE
from nanoengine.kernels.prefault import Prefault
from tests.support import model_runner

AHEAD, BLOCKS = 8, 20
"""Blocks that are taken before they are used, and those of a pool; each is a huge page."""


@pytest.fixture(autouse=True)
def _is_soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "QUIET_SECONDS", 0.01)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what was asked for; the system is not asked."""
    sizes = list[int]()
    monkeypatch.setattr(prefault, "populate", lambda _, size: sizes.append(size) or True)
    return sizes


@pytest.fixture
def cache() -> BlockMajorKVCache:
    return new_cache()


def new_cache() -> BlockMajorKVCache:
    return BlockMajorKVCache(BLOCKS - 1, [[0]], (HUGE_PAGE // 2,), torch.uint8, torch.device("cpu"))


def ended(part: Prefault) -> bool:
    assert part._thread is not None
    part._thread.join(20)
    return not part._thread.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone is asked")
def test_memory_is_there_before_it_is_written(cache: BlockMajorKVCache) -> None:
    def pages_there(first: int, count: int) -> int:
        pages = (ctypes.c_ubyte * (count * HUGE_PAGE // mmap.PAGESIZE))()
        where = ctypes.c_void_p(cache.pool[first].data_ptr()), ctypes.c_size_t(count * HUGE_PAGE)
        assert not ctypes.CDLL(None).mincore(*where, pages)
        return sum(page & 1 for page in pages)

    if not prefault.populate(cache.pool.data_ptr(), mmap.PAGESIZE):
        pytest.skip("this kernel cannot be asked")
    cache.pool[3, 0, 0, 5] = 7
    assert ended(Prefault(cache, AHEAD))
    assert pages_there(1, AHEAD) == AHEAD * HUGE_PAGE // mmap.PAGESIZE
    assert not pages_there(AHEAD + 2, BLOCKS - AHEAD - 2)
    assert cache.pool[3, 0, 0, 5] == 7
    assert cache.pool.count_nonzero() == 1


def test_so_much_is_taken_behind_the_highest_block_in_use(cache: BlockMajorKVCache, taken: list[int]) -> None:
    part = Prefault(cache, AHEAD)
    assert ended(part)
    assert taken == [HUGE_PAGE] * AHEAD
    part.begin(StepPlan(tables=[Entries(0, 0, 0, [2, 11, 4]), Entries(0, 0, 3, [])]))
    part.end(StepResult([]))
    assert ended(part)
    assert len(taken) == AHEAD + AHEAD  # of the blocks up to 11 none: who uses them takes them
    part.begin(StepPlan(tables=[Entries(0, 0, 0, [3, BLOCKS - 2])]))
    part.end(StepResult([]))
    assert ended(part)
    assert len(taken) == AHEAD + AHEAD  # the last block was among them
    part.close()


def test_a_large_model_takes_a_bounded_amount(
    cache: BlockMajorKVCache, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefault, "AHEAD_BYTES", 3 * HUGE_PAGE)
    assert ended(Prefault(cache, AHEAD))
    assert len(taken) == 3


def test_nothing_is_taken_while_there_are_steps(cache: BlockMajorKVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, made, begun = list[int](), threading.Event(), threading.Event()

    def populate(_: int, size: int) -> bool:
        made.wait()
        taken.append(size)
        if len(taken) == 3:
            part.begin(StepPlan())
            begun.set()
        return True

    monkeypatch.setattr(prefault, "populate", populate)
    part = Prefault(cache, AHEAD)
    made.set()
    assert begun.wait(20)
    time.sleep(0.1)
    assert len(taken) == 3
    part.end(StepResult([]))
    assert ended(part)
    assert len(taken) == AHEAD


def test_closing_stops_it(cache: BlockMajorKVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, made, entered = list[int](), threading.Event(), threading.Event()

    def populate(_: int, size: int) -> bool:
        made.wait()
        taken.append(size)
        entered.set()
        return part._closing.wait(20)

    monkeypatch.setattr(prefault, "populate", populate)
    part = Prefault(cache, AHEAD)
    made.set()
    assert entered.wait(20)
    part.close()
    assert ended(part)
    assert len(taken) == 1


@pytest.mark.parametrize("lacking", ["memory", "madvise"])
def test_without_memory_to_spare_or_a_system_to_ask_nothing_is_taken(
    lacking: str, cache: BlockMajorKVCache, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not asked again, either."""
    if lacking == "memory":
        monkeypatch.setattr(prefault, "available_ram", lambda: prefault.LEAST_RAM - 1)
    else:
        monkeypatch.setattr(prefault, "populate", lambda _, size: bool(taken.append(size)))
    part = Prefault(cache, AHEAD)
    assert ended(part)
    part.begin(StepPlan(tables=[Entries(0, 0, 0, [5])]))
    part.end(StepResult([]))
    assert ended(part)
    assert len(taken) == (lacking == "madvise")
    part.close()


def test_a_cache_that_nobody_has_any_more_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, entered, go_on = new_cache(), threading.Event(), threading.Event()
    monkeypatch.setattr(prefault, "populate", lambda *_: (entered.set(), go_on.wait()))
    part, held = Prefault(cache, AHEAD), weakref.ref(cache)
    assert entered.wait(20)
    part.begin(StepPlan())
    del cache
    go_on.set()
    assert ended(part)
    gc.collect()
    assert held() is None


@pytest.mark.usefixtures("taken")
def test_an_engine_asks_for_the_memory_of_blocks_that_no_request_has_used() -> None:
    with LLM("demo", dtype="float32", device="cpu", num_kv_blocks=200, use_tqdm=False) as llm:
        runner = model_runner(llm)
        if not isinstance(runner.kv_cache, BlockMajorKVCache):
            pytest.skip("the native kernels do not run here")
        (part,) = [part for part in runner.parts if isinstance(part, Prefault)]
        assert ended(part)
        before = part._wanted
        llm.generate([list(range(5, 105))], SamplingParams(max_tokens=4), use_tqdm=False)
        assert part._wanted > before
    assert ended(part)
