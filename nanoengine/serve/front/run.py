"""Runs a server of several models, until a signal ends it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import uvicorn

from nanoengine.serve.front.catalogue import catalogue
from nanoengine.serve.front.config import FrontConfig
from nanoengine.serve.front.endpoints import ENDPOINTS
from nanoengine.serve.front.front import Front
from nanoengine.serve.server.config import ServerConfig
from nanoengine.serve.server.http.app import http_settings
from nanoengine.serve.server.jobs import LAST_EVENT_SECONDS
from nanoengine.serve.server.serve import Server, end_hard, listen


def serve_several(
    models: Sequence[str],
    tables: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
    config: ServerConfig,
    limits: FrontConfig,
) -> None:
    """Serve several models. Arguments: see `catalogue`, `ServerConfig` and `FrontConfig`.

    Raises:
        InvalidConfig: two models of one name, a folder that is none, an address that cannot be listened on.
        UnknownOption: of an engine.
    """
    sources = catalogue(models, limits.models_dir, tables, options)
    listen(config, lambda: Front(sources, config, limits), FrontServer)


class FrontServer(Server):
    """The server of a `Front`."""

    def settings(self, serving: Front) -> uvicorn.Config:
        return http_settings(serving, ENDPOINTS)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._work = asyncio.create_task(self._serving.run())

    async def _drain(self) -> None:
        """All models drain at the same time, and at a second signal abort what runs."""
        front, loop = self._serving, asyncio.get_running_loop()
        self._work.cancel()
        await asyncio.wait({self._work})
        hurry = loop.create_task(self._hurry.wait())
        hurry.add_done_callback(lambda _: front.hurry())
        await front.loader.close()
        hurry.cancel()
        end = loop.time() + LAST_EVENT_SECONDS
        while front.jobs and loop.time() < end:  # their last bytes
            await asyncio.sleep(0.01)
        threading.Thread(target=end_hard, args=(None, self._over), daemon=True).start()
        self.should_exit = True
