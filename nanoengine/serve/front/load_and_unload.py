"""Loader: loads models when they are requested, one at a time, and unloads others to make room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from nanoengine.errors import NanoEngineError
from nanoengine.serve.front.child import Child
from nanoengine.serve.front.config import FrontConfig, duration
from nanoengine.serve.front.memory_plan import MemoryPlan
from nanoengine.serve.front.model import Model, State
from nanoengine.serve.server.errors import RETRY_AFTER, APIError
from nanoengine.sizes import format_bytes

logger = logging.getLogger("nanoengine.serve.front")

IDLE_CHECK_SECONDS = 0.2
"""Between two looks for models without requests."""

SHUTTING_DOWN = APIError(503, "the server is shutting down", headers=RETRY_AFTER)


class Loader:
    """All models of a server.

    Args:
        models: in the order in which they are listed.
        config: has the limits.
        end_seconds: in which a process ends after SIGTERM.
        memory: whether one more fits.
        start: starts the process of a model with these options.
    """

    def __init__(
        self,
        models: list[Model],
        config: FrontConfig,
        end_seconds: float,
        memory: MemoryPlan,
        start: Callable[[Model, dict[str, Any]], Awaitable[Child]],
    ):
        self.models, self._config, self._memory = models, config, memory
        self._end_seconds, self._start = end_seconds, start
        self._keep_alive = duration(config.keep_alive)
        self._turn = asyncio.Lock()  # held by the load that runs
        self._is_closed = False

    # ---- requests

    @contextlib.contextmanager
    def using(self, model: Model, keep_alive: float | None = None) -> Iterator[None]:
        """A request for a model: while it lasts, the model is not unloaded. `keep_alive`: seconds of the time
        after it; None: those of the options.
        """
        model.last_use = time.monotonic()
        model.num_running += 1
        model.keep_alive = self._keep_alive if keep_alive is None else keep_alive
        try:
            yield
        finally:
            model.num_running -= 1
            model.last_use = time.monotonic()

    async def loaded(self, model: Model, *, now: bool = False) -> Child:
        """The process of a model, once it is loaded; called within `using`, or for a pinned model. `now`: without a pause
        after a failure.

        Raises:
            APIError: 503: it failed to load, or there is no room.
        """
        if now:
            model.retry_at = 0.0
        while not model.is_loaded:
            if self._is_closed:
                raise SHUTTING_DOWN
            if model.retry_at > time.monotonic():
                raise _failed(model)
            load = model.load = model.load or asyncio.create_task(self._load_in_turn(model))
            await asyncio.wait({load})  # others may wait for it
            if not load.cancelled() and (problem := load.result()) is not None:
                raise problem
        assert model.child is not None
        return model.child

    # ---- one load at a time

    async def _load_in_turn(self, model: Model) -> APIError | None:
        """Load a model after those that were requested before it, if somebody still waits for it. Returns the error."""
        try:
            async with self._turn, model.lock:
                return await self._load(model) if model.num_running or model.is_pinned else None
        finally:
            model.load = None

    async def _load(self, model: Model) -> APIError | None:
        model.reading, limit = None, self._config.load_timeout  # the files may be others since they were read
        try:
            # Without headers the process says what is wrong, or fetches the files from the hub.
            options, model.need = self._memory.plan(model.source, await model.read())
            await self._make_room(model)
            model.state, start = State.LOADING, time.monotonic()
            logger.info("%s: loading", model.name)
            async with asyncio.timeout(limit):
                model.child = child = await self._start(model, options)
                model.served = await child.ready()
        except APIError as error:
            return error
        except Exception as error:  # of one model: the others are loaded nevertheless
            if model.child is not None:
                await model.child.end(0)
            is_late = isinstance(error, TimeoutError)
            model.failed(f"it was not loaded after {limit:g} s (load_timeout)" if is_late else str(error))
            is_ours = not isinstance(error, (TimeoutError, NanoEngineError))
            logger.error("%s: loading failed: %s", model.name, model.reason, exc_info=is_ours)
            return _failed(model)
        model.state, model.num_failures, model.reason = State.LOADED, 0, ""
        model.last_use = time.monotonic()  # who has waited may be gone by now
        logger.info("%s: loaded in %.1f s", model.name, time.monotonic() - start)
        child.ended.add_done_callback(lambda _: self._ended(model, child))
        return None

    def _ended(self, model: Model, child: Child) -> None:
        """A process has ended by itself."""
        if model.child is child and model.state is State.LOADED:
            model.gone(child.reason)
            logger.error("%s: %s; the next request loads it again", model.name, child.reason)

    # ---- room

    @property
    def in_memory(self) -> dict[Model, Child]:
        """Models with a process."""
        return {model: model.child for model in self.models if model.child is not None}

    async def _make_room(self, model: Model) -> None:
        """Unload models without requests, the one first whose last request is the oldest. Raises APIError if it is not enough."""
        while (lacking := self._lacking(model)) is not None:
            idle = [one for one in self.in_memory if not (one.num_running or one.is_pinned)]
            if not idle or lacking > sum(one.need for one in idle):
                raise APIError(503, self._no_room(model, lacking), headers=RETRY_AFTER)
            await self.unload(min(idle, key=lambda one: one.last_use))

    def _lacking(self, model: Model) -> int | None:
        """Bytes that are missing for a model, or 0 where only the number of models is too large; None: it fits."""
        needs = {child.pid: one.need for one, child in self.in_memory.items()}
        if (missing := model.need - self._memory.free(needs)) > 0:
            return missing
        return 0 if len(needs) >= self._config.max_loaded_models else None

    def _no_room(self, model: Model, lacking: int) -> str:
        limit = f"{format_bytes(lacking)} of memory are missing"
        if not lacking:
            limit = f"{self._config.max_loaded_models} models are loaded (max_loaded_models)"
        text = f"there is no room for the model {model.name}, which takes {format_bytes(model.need)}: {limit}"
        uses = {one: "pinned" if one.is_pinned else f"{one.num_running} requests" for one in self.in_memory}
        holders = "; ".join(f"{one.name} has {format_bytes(one.need)} ({use})" for one, use in uses.items())
        return f"{text}; {holders}; try again later" if holders else f"{text}; lower its kv_cache_memory"

    async def unload(self, model: Model) -> bool:
        """End the process of a model; returns when its memory is free. False: it has requests by then."""
        async with model.lock:
            if (child := model.child) is not None and not model.num_running:
                model.state = State.UNLOADING
                await child.end(self._end_seconds)
                model.gone()
                logger.info("%s: unloaded", model.name)
        return model.child is None

    async def unload_idle(self) -> None:
        """Unload models whose time without requests is over, for ever."""
        unloads = set[asyncio.Task[bool]]()
        while True:
            await asyncio.sleep(IDLE_CHECK_SECONDS)
            unloads = {unload for unload in unloads if not unload.done()}  # no other waits for a process that ends late
            unloads |= {asyncio.create_task(self.unload(model)) for model in self.models if model.seconds_left <= 0}

    async def close(self) -> None:
        """End all processes, in which requests go on as long as their servers allow; who waits for a load is refused."""
        self._is_closed = True
        loads = [model.load for model in self.models if model.load is not None]
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        for model in self.in_memory:
            model.state = State.UNLOADING
        await asyncio.gather(*(child.end(self._end_seconds) for child in self.in_memory.values()))


def _failed(model: Model) -> APIError:
    after = str(max(1, math.ceil(model.retry_at - time.monotonic())))
    message = f"the model {model.name} failed to load: {model.reason}; it is tried again in {after} s"
    return APIError(503, message, headers={"retry-after": after})
