"""The process of a replica: it builds an engine, and serves it to the front at the other end of a connection.

`python -m nanoengine.scale.replicas.process FD`: the first message on the socket FD has the config and the seed of the hashes;
`messages.py` has all others. The process ends at `End`, or when the front has closed the socket.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import nanoengine
from nanoengine.builder import Built, build_engine
from nanoengine.errors import EngineDead
from nanoengine.features.observability.view import view_of_engine
from nanoengine.scale.replicas.messages import End, Failed, Ping, Pong, Ready, Submit
from nanoengine.scale.replicas.options import option_of
from nanoengine.scale.replicas.replica import Replica
from nanoengine.scale.worker.child import connect_to_parent, portable, receive, signs_of_life

logger = logging.getLogger("nanoengine")


def serve(connection: Connection, build: Callable[[], Built], hash_seed: int) -> None:
    """Serve an engine on a connection. Returns at `End`; ends the process if the other side is gone.

    Args:
        connection: to the front; no other code uses it.
        build: builds the engine, in this thread.
        hash_seed: of its prefix cache, unless it stores K/V in files.
    """
    loop = ReplicaLoop(connection)
    try:
        with signs_of_life(partial(loop.send, Pong(0.0))):
            built = build()
    except Exception as error:
        loop.finish(Failed(portable(error)))
        return
    engine = built.engine
    if option_of(built.config, "kv_disk_path") is None:  # files are named after hashes: their folder has a seed
        engine.scheduler.blocks.seed = hash_seed
    count = lambda: (built.metrics.snapshot(engine), view_of_engine(engine, built.metrics))  # noqa: E731
    adapters = getattr(built.capabilities.get("lora"), "adapters", None)
    loop.replica = Replica(engine, built.metrics.events, count, adapters)
    computes = built.capabilities["replicas"].computes
    identity = f"nanoengine {nanoengine.__version__}, {computes}"
    loop.send(Ready(engine.max_model_len, engine.scheduler.blocks.seed, identity))
    try:
        loop.run()
    except EngineDead as error:
        loop.finish(Failed(error))
    except BaseException:  # the threads that read and write would keep the process alive
        logger.critical("process %d of a replica ends", os.getpid(), exc_info=True)
        os._exit(1)


class ReplicaLoop:
    """The threads of a replica: for steps, for reading and for writing, so that no message and no full socket delays a step."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.replica: Replica  # set before the first message arrives
        self._inbox: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._step_began: float | None = None
        self._reader, self._writer = (threading.Thread(target=each, daemon=True) for each in (self._read, self._write))
        self._reader.start()
        self._writer.start()
        self.send = self._outbox.put

    def finish(self, message: Any = None) -> None:
        """Send a last message, if any, and wait until all messages are sent."""
        for last in (message, None):
            self._outbox.put(last)
        self._writer.join()

    def run(self) -> None:
        replica, engine = self.replica, self.replica.engine
        while True:
            while not engine.has_unfinished or not self._inbox.empty():
                message, request = self._inbox.get()
                if isinstance(message, End):
                    engine.close()
                    self.finish()
                    return
                replica.receive(message, request)
                if self._inbox.empty() and not engine.has_unfinished:
                    self._step()
            self._step_began = time.monotonic()
            self._step()
            self._step_began = None

    def _step(self) -> None:
        if (update := self.replica.step()) is not None:
            self.send(update)

    def _read(self) -> None:
        while True:
            message, request = receive(self.connection), None
            if isinstance(message, Ping):
                began = self._step_began
                self._outbox.put(Pong(0.0 if began is None else time.monotonic() - began))
            elif isinstance(message, Submit):
                try:
                    request = self.replica.make_request(message.resumable)
                except Exception:  # the thread with the steps raises it again, and sends it
                    request = None
            self._inbox.put((message, request))

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self.connection.send(message)
        except OSError:
            os._exit(0)


def main() -> None:
    connection = connect_to_parent()
    config, use_tqdm, hash_seed = receive(connection)
    serve(connection, lambda: build_engine(config, use_tqdm), hash_seed)


if __name__ == "__main__":
    main()
