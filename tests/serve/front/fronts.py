"""A front over toy processes, on a port of its own, in a thread; and a loader over processes that are none."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nanoengine.core.config import EngineConfig
from nanoengine.serve.front import child as child_module
from nanoengine.serve.front.catalogue import Source
from nanoengine.serve.front.config import FrontConfig
from nanoengine.serve.front.front import Front
from nanoengine.serve.front.memory_plan import MemoryPlan
from nanoengine.serve.front.run import FrontServer
from nanoengine.serve.server.config import ServerConfig
from tests.serve.server.running import Server as OneModel
from tests.serve.server.running import until

MIB = 1 << 20
TOY = (sys.executable, str(Path(__file__).with_name("toy_child.py")))


class FrontOfToys:
    """A server of several models, each a toy process; the methods of a client are those of `running.Server`.

    Args:
        models: what each name stands for: see `toy_child`.
        available: bytes of memory.
        limits: of `FrontConfig`.
        options: of the engines.
        config: of the server.
    """

    def __init__(
        self,
        models: Mapping[str, str],
        available: int = 1 << 40,
        limits: Any = None,
        options: Any = None,
        **config: Any,
    ):
        options = options or {"kv_cache_memory": 100 * MIB}
        checked = EngineConfig(model="toy", **options)
        sources = {name: Source(name, model, options, checked) for name, model in models.items()}
        self.front = Front(
            sources, ServerConfig(port=0, **config), FrontConfig(**(limits or {})), MemoryPlan(3, lambda: available)
        )
        self._over = threading.Event()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(64)
        self.address = self._socket.getsockname()
        self.server = FrontServer(self.front, self._socket, self._over)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        until(lambda: self.server.started)

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            await self.server._serve([self._socket])
            await asyncio.sleep(0)
            self.tasks_left = len(asyncio.all_tasks()) - 1

        asyncio.run(serve())

    def signal(self) -> None:
        """What SIGTERM does."""
        self.loop.call_soon_threadsafe(self.server._end)

    def close(self) -> None:
        if self._thread.is_alive():
            self.signal()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._over.set()
        self.front.close()
        self._socket.close()

    def states(self) -> dict[str, str]:
        return {model.name: model.state.value for model in self.front.loader.models}

    request, get, post, connect = OneModel.request, OneModel.get, OneModel.post, OneModel.connect

    def complete(self, model: str, prompt: str = "hello", path: str = "/v1/completions", **fields: Any) -> Any:
        return self.post(path, {"model": model, "prompt": prompt, **fields})  # type: ignore[misc]


@pytest.fixture
def make_front(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes fronts over toys."""
    monkeypatch.setattr(child_module, "COMMAND", TOY)
    fronts: list[FrontOfToys] = []

    def make(models: Mapping[str, str], **options: Any) -> FrontOfToys:
        fronts.append(FrontOfToys(models, **options))
        return fronts[-1]

    yield make
    for front in fronts:
        front.close()
