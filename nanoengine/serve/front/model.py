"""Model: one model of the server, and the state that it is in."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nanoengine.serve.front.catalogue import Source
from nanoengine.serve.front.child import Child
from nanoengine.serve.front.headers import Headers, read_headers
from nanoengine.serve.front.memory_plan import PROCESS_BYTES, resident
from nanoengine.serve.server.errors import APIError

MAX_PAUSE_SECONDS = 300.0
"""The longest pause after a load that failed; the first is a second, and each further one twice as long."""


class State(Enum):
    """Of a model; the values are for people."""

    NOT_LOADED = "not loaded"
    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"
    UNLOADING = "unloading"


@dataclass(eq=False)
class Model:
    """A model, loaded or not; used on the event loop of the front.

    Attributes:
        source: what is loaded.
        is_pinned: it stays loaded.
        keep_alive: seconds after its last request until it is unloaded.
        child: its process, while there is one.
        need: bytes of memory for that process.
        served: what its server says in /v1/models: the model and its adapters.
        num_running: requests that it answers, or that wait for it.
        last_use: time.monotonic() at which the last of them began or ended, or its load ended.
        num_failures: loads that failed since one went well.
        reason: of the last failure.
        retry_at: time.monotonic() before which it is not loaded again by a request.
        reading: reads its headers, or has read them; the result is a text where they cannot be read.
        load: loads it, or waits for its turn; the result is the error of the requests that wait.
        lock: held during a load and an unload.
    """

    source: Source
    is_pinned: bool = False
    keep_alive: float = 0.0
    state: State = State.NOT_LOADED
    child: Child | None = None
    need: int = 0
    served: list[dict[str, Any]] = field(default_factory=list)
    num_running: int = 0
    last_use: float = 0.0
    num_failures: int = 0
    reason: str = ""
    retry_at: float = 0.0
    reading: asyncio.Future[Headers | str] | None = None
    load: asyncio.Task[APIError | None] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_loaded(self) -> bool:
        return self.state is State.LOADED

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def names(self) -> list[str]:
        """Its name, and those of its adapters."""
        return [str(one["id"]) for one in self.served] or [self.name, *self.source.adapters]

    async def read(self) -> Headers | None:
        """Its headers, which are read once, in a thread; None: they cannot be, or the model is not on this machine yet."""
        while self.reading is None or not self.reading.done():  # a load reads them anew
            self.reading = self.reading or asyncio.ensure_future(asyncio.to_thread(self._read))
            await asyncio.wait({self.reading})  # others may wait for it
        return self.headers

    def _read(self) -> Headers | str:
        try:
            return read_headers(self.source)
        except Exception as error:  # whatever is wrong with the files, which the error itself would hold open
            return str(error) or type(error).__name__

    @property
    def headers(self) -> Headers | None:
        """What its files say; None: it was not read yet, or cannot be read."""
        facts = self.reading.result() if self.reading is not None and self.reading.done() else None
        return facts if isinstance(facts, Headers) else None

    @property
    def progress(self) -> float:
        """The part of its memory that a load has filled, from 0 to 1."""
        if self.state is not State.LOADING or self.child is None:
            return float(self.state is State.LOADED)
        weights = max(1, self.headers.weight_bytes(self.source.config) if self.headers else 1)
        return min(max(0.0, (resident(self.child.pid) - PROCESS_BYTES // 2) / weights), 0.99)

    @property
    def seconds_left(self) -> float:
        """Seconds until it is unloaded, if no request comes before; infinite: it stays, or is in use or not loaded."""
        stays = self.num_running or self.is_pinned or not self.is_loaded
        return math.inf if stays else self.last_use + self.keep_alive - time.monotonic()

    def gone(self, reason: str = "") -> None:
        """Its process has ended."""
        self.state, self.child, self.served, self.reason = State.NOT_LOADED, None, [], reason

    def failed(self, reason: str) -> None:
        """A load failed."""
        self.gone(reason)
        self.state = State.FAILED
        self.retry_at = time.monotonic() + min(2.0 ** min(self.num_failures, 10), MAX_PAUSE_SECONDS)
        self.num_failures += 1
