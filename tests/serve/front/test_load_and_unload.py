"""The loader alone: one load at a time, in the order of the requests, and room by the oldest request."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from nanoengine.core.config import EngineConfig
from nanoengine.serve.front import load_and_unload
from nanoengine.serve.front import model as model_module
from nanoengine.serve.front.catalogue import Source
from nanoengine.serve.front.child import Child
from nanoengine.serve.front.config import FrontConfig
from nanoengine.serve.front.load_and_unload import Loader
from nanoengine.serve.front.memory_plan import PROCESS_BYTES, MemoryPlan
from nanoengine.serve.front.model import Model, State
from nanoengine.serve.front.upstream import NoAnswer
from nanoengine.serve.server.errors import APIError

pytestmark = pytest.mark.anyio

MIB = 1 << 20
NEED = PROCESS_BYTES + 100 * MIB


class Toy:
    """A process that is none: it is ready when a test says so."""

    def __init__(self, name: str):
        self.name, self.pid = name, -1
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.can_go_on, self.reason = asyncio.Event(), "its weights are broken"

    async def ready(self) -> list[dict[str, Any]]:
        waits = [asyncio.ensure_future(self.can_go_on.wait()), self.ended]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            raise NoAnswer(self.reason)
        return [{"id": self.name}]

    async def end(self, _: float) -> None:
        await asyncio.sleep(0)
        if not self.ended.done():
            self.ended.set_result(None)


class House:
    """A loader of models named by letters; each needs NEED bytes."""

    def __init__(self, names: str = "abc", available: float = 9, pinned: str = "", **config: Any):
        self.started: list[Toy] = []
        self.is_quick = True
        free = int(available * NEED)
        checked = EngineConfig(model="nowhere", kv_cache_memory=100 * MIB)
        models = [Model(Source(name, "nowhere", {}, checked), name in pinned) for name in names]
        memory = MemoryPlan(3, lambda: free)  # processes that are none have touched nothing
        self.loader = Loader(models, FrontConfig(**config), 1.0, memory, self._start)
        self.models = {model.name: model for model in models}

    async def _start(self, model: Model, _: dict[str, Any]) -> Child:
        toy = Toy(model.name)
        toy.pid = -len(self.started) - 1
        self.started.append(toy)
        if self.is_quick:
            toy.can_go_on.set()
        return cast("Child", toy)

    async def use(self, name: str, until: Awaitable[Any] | None = None, *, now: bool = False) -> None:
        """A request, which lasts until something has happened."""
        with self.loader.using(self.models[name]):
            async with asyncio.timeout(10):
                await self.loader.loaded(self.models[name], now=now)
            if until is not None:
                await until

    @property
    def loaded(self) -> str:
        return "".join(name for name, model in self.models.items() if model.is_loaded)


async def a_while() -> None:
    """Until all tasks that can go on have done so; headers are read in a thread."""
    for _ in range(20):
        await asyncio.sleep(0.002)


async def test_models_are_loaded_one_at_a_time_in_the_order_of_their_requests() -> None:
    house = House()
    house.is_quick = False
    requests = [asyncio.create_task(house.use(name)) for name in "cabca"]
    for count, name in enumerate("cab", 1):
        await a_while()
        assert [toy.name for toy in house.started] == list("cab"[:count])
        assert house.models[name].state is State.LOADING
        house.started[-1].can_go_on.set()
    await asyncio.gather(*requests)
    assert house.loaded == "abc"


async def test_who_hangs_up_leaves_the_line() -> None:
    house = House()
    house.is_quick = False
    requests = [asyncio.create_task(house.use(name)) for name in "abc"]
    await a_while()
    requests[1].cancel()
    await a_while()
    house.started[0].can_go_on.set()
    await a_while()
    house.started[1].can_go_on.set()
    await requests[2]
    assert [toy.name for toy in house.started] == ["a", "c"]
    assert house.models["b"].num_running == 0


@pytest.mark.parametrize("options", [{"max_loaded_models": 2}, {"available": 2.5}])
async def test_room_is_made_by_the_model_whose_last_request_is_the_oldest(options: dict[str, Any]) -> None:
    house = House(**options)
    for name in "abac":
        await house.use(name)
    assert house.loaded == "ac"
    await house.use("b")
    assert house.loaded == "bc"


@pytest.mark.parametrize("options", [{"max_loaded_models": 2, "pinned": "a"}, {"available": 2.5, "pinned": "a"}])
async def test_nothing_that_runs_or_is_pinned_is_unloaded(options: dict[str, Any]) -> None:
    house = House(**options)
    end = asyncio.Event()
    await house.use("a")
    request = asyncio.create_task(house.use("b", end.wait()))
    await a_while()
    with pytest.raises(APIError) as refused:
        await house.use("c")
    assert refused.value.status == 503
    assert refused.value.headers == {"retry-after": "1"}
    for word in ("no room for the model c", "a has", "pinned", "b has", "1 requests"):
        assert word in refused.value.message
    assert house.loaded == "ab"
    end.set()
    await request
    await house.use("c")
    assert house.loaded == "ac"


async def test_nothing_is_unloaded_for_a_model_that_would_not_fit_even_then() -> None:
    house = House()
    for name in "ab":
        await house.use(name)
    large = EngineConfig(model="nowhere", kv_cache_memory=9 * NEED)
    house.models["c"].source = replace(house.models["c"].source, config=large)
    with pytest.raises(APIError, match="memory are missing"):
        await house.use("c")
    assert house.loaded == "ab"


async def test_a_load_that_fails_says_why_and_is_tried_again_after_a_growing_pause() -> None:
    house = House()
    house.is_quick = False
    model = house.models["a"]
    pauses = []
    for count in range(4):
        request = asyncio.create_task(house.use("a", now=True))
        await a_while()
        house.started[count].ended.set_result(None)
        with pytest.raises(APIError, match="failed to load: its weights are broken") as refused:
            await request
        assert refused.value.headers is not None
        pauses.append(int(refused.value.headers["retry-after"]))
        with pytest.raises(APIError, match="it is tried again in"):
            await house.use("a")
        assert len(house.started) == count + 1
    assert pauses == [1, 2, 4, 8]
    house.is_quick = True
    await house.use("b")
    await house.use("a", now=True)
    assert (model.state, model.num_failures, model.reason) == (State.LOADED, 0, "")


async def test_a_load_has_a_limit() -> None:
    house = House(load_timeout=0.05)
    house.is_quick = False
    with pytest.raises(APIError, match="load_timeout"):
        await house.use("a")
    assert house.started[0].ended.done()


async def test_a_process_that_ends_by_itself_is_started_again_by_the_next_request() -> None:
    house = House()
    await house.use("a")
    house.started[0].ended.set_result(None)
    await a_while()
    assert house.models["a"].state is State.NOT_LOADED
    assert house.models["a"].reason == "its weights are broken"
    await house.use("a")
    assert len(house.started) == 2


async def test_an_idle_model_is_unloaded_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_and_unload, "IDLE_CHECK_SECONDS", 0.005)
    house = House(keep_alive="0")
    work = asyncio.create_task(house.loader.unload_idle())
    model, end = house.models["a"], asyncio.Event()
    with house.loader.using(model, math.inf):
        request = asyncio.create_task(house.use("a", end.wait()))
        await house.loader.loaded(model)
    await a_while()
    assert model.is_loaded  # the other request goes on
    end.set()
    await request
    await a_while()
    assert model.state is State.NOT_LOADED
    with house.loader.using(model, math.inf):
        await house.loader.loaded(model)
    await a_while()
    assert (model.state, model.seconds_left) == (State.LOADED, math.inf)
    work.cancel()


async def test_a_process_that_does_not_end_keeps_no_other_idle_model_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_and_unload, "IDLE_CHECK_SECONDS", 0.005)
    house = House(keep_alive="0")
    work = asyncio.create_task(house.loader.unload_idle())
    await house.use("a")
    ends = asyncio.Event()
    monkeypatch.setattr(house.started[0], "end", lambda _: ends.wait())
    await a_while()
    assert house.models["a"].state is State.UNLOADING
    await house.use("b")
    await a_while()
    assert house.models["b"].state is State.NOT_LOADED
    ends.set()
    await a_while()
    assert house.models["a"].state is State.NOT_LOADED
    work.cancel()


async def test_the_time_of_a_model_whose_client_hung_up_begins_when_it_is_loaded() -> None:
    house = House(keep_alive="1")
    house.is_quick = False
    request = asyncio.create_task(house.use("a"))
    await a_while()
    request.cancel()
    await a_while()
    model = house.models["a"]
    model.last_use -= 300  # the load takes long
    house.started[0].can_go_on.set()
    await a_while()
    assert model.is_loaded
    assert 0 < model.seconds_left <= 1


async def test_headers_are_those_of_the_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [threading.Event(), threading.Event()]
    waits = iter(ends)

    def read(_: Source) -> None:
        assert next(waits).wait(10)
        raise NoAnswer("no header")

    monkeypatch.setattr(model_module, "read_headers", read)
    model = House().models["a"]
    look = asyncio.create_task(model.read())
    await a_while()
    model.reading = None  # as a load does
    load = asyncio.create_task(model.read())
    ends[0].set()
    await a_while()
    assert not look.done()
    ends[1].set()
    assert [await look, await load] == [None, None]
    assert model.reading is not None
    assert model.reading.result() == "no header"


async def test_files_that_cannot_be_read_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(b"GGUF" + bytes(1000))
    model = House().models["a"]
    model.source = replace(model.source, model=str(path))
    assert await model.read() is None
    assert str(path) not in Path("/proc/self/maps").read_text()


async def test_a_request_during_an_unload_waits_for_the_next_load() -> None:
    house = House()
    await house.use("a")
    unload = asyncio.create_task(house.loader.unload(house.models["a"]))
    await asyncio.sleep(0)
    assert house.models["a"].state is State.UNLOADING
    await house.use("a")
    await unload
    assert (house.loaded, len(house.started)) == ("a", 2)


async def test_an_unload_behind_which_a_request_came_says_that_nothing_was_unloaded() -> None:
    house = House()
    await house.use("a")
    model = house.models["a"]
    async with model.lock:
        unload = asyncio.create_task(house.loader.unload(model))
        await asyncio.sleep(0)
        end = asyncio.Event()
        request = asyncio.create_task(house.use("a", end.wait()))
        await asyncio.sleep(0)
    assert not await unload
    assert model.is_loaded
    end.set()
    await request
    assert await house.loader.unload(model)


async def test_an_error_of_the_loader_is_that_of_one_load(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    monkeypatch.setattr(house.models["a"], "read", None)
    with pytest.raises(APIError, match="the model a failed to load"):
        await house.use("a")
    await house.use("b")
    assert house.loaded == "b"


async def test_at_the_end_who_waits_is_refused_and_all_processes_end() -> None:
    house = House()
    await house.use("a")
    house.is_quick = False
    request = asyncio.create_task(house.use("b"))
    await a_while()
    await house.loader.close()
    with pytest.raises(APIError, match="shutting down"):
        await request
    with pytest.raises(APIError, match="shutting down"):
        await house.use("c")
    assert all(toy.ended.done() for toy in house.started)
