"""RayCarrier: replicas as actors of a Ray cluster.

Ray finds a node with room for a replica, starts a process there, and returns its address. Messages go over a socket between this
process and that one: no token passes Ray. Ray restarts nothing and tries nothing again (`max_restarts=0`, `max_task_retries=0`):
it would repeat a lost stream and leave out as many items as were delivered, and the number of tokens in an item depends on time.
The supervisor starts another replica instead, and requests go on from their tokens.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from multiprocessing.connection import Connection
from typing import Any, cast

from nanoengine.core.config import EngineConfig
from nanoengine.errors import EngineClosed
from nanoengine.scale.ray.cluster import package
from nanoengine.scale.ray.handshake import accept, connect
from nanoengine.scale.ray.room import Room

logger = logging.getLogger("nanoengine")

LOOK_SECONDS = 0.5
"""How often a start that waits for room checks whether it is still wanted."""

TELL_SECONDS = 30.0
"""How often a start that waits for room says so in the log."""


class RayReplica:
    """The actor: a process on a node, which listens for the front."""

    def listen(self, key: bytes) -> tuple[str, int]:
        """Listen for the front, which has the key; returns the address."""
        import ray

        self._server, self._key = socket.create_server((ray.util.get_node_ip_address(), 0)), key
        return cast(tuple[str, int], self._server.getsockname())

    def run(self, config: EngineConfig, hash_seed: int) -> None:
        """Serve an engine to the front, until it sends `End`; then the process ends."""
        import ray

        from nanoengine.builder import build_engine
        from nanoengine.scale.replicas.process import serve

        with self._server:
            connection = accept(self._server, self._key)
        send_at_once(connection)
        serve(connection, lambda: build_engine(config, False), hash_seed)
        ray.actor.exit_actor()


class StartedActor:
    """An actor that runs."""

    def __init__(self, actor: Any, running: Any, own: socket.socket):
        self.actor, self.socket = actor, own
        self._running = running  # Ray keeps the call while this reference exists

    def kill(self) -> None:
        package().kill(self.actor)

    def ending(self) -> str:
        return "was lost: its actor or its node has ended"


class RayCarrier:
    """See `Carrier`.

    Args:
        config: of each replica's engine.
        room: CPUs and GPUs of each replica.
        hash_seed: of the hashes in the prefix caches of all replicas.
    """

    def __init__(self, config: EngineConfig, room: Room, hash_seed: int):
        self.config, self.room, self.hash_seed = config, room, hash_seed
        self.waits: dict[int, str] = {}
        self._key = secrets.token_bytes(32)  # messages are pickled: nobody else may send any
        self._is_closed = False
        self._actor_class = (
            package()
            .remote(RayReplica)
            .options(
                num_cpus=room.num_cpus,
                num_gpus=room.num_gpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy="SPREAD",
            )
        )

    def start(self, number: int) -> StartedActor:
        actor = self._actor_class.remote()
        try:
            host, port = self._wait(number, actor.listen.remote(self._key))
            running = actor.run.remote(self.config, self.hash_seed)
            connection = connect((host, port), self._key)
        except BaseException:
            package().kill(actor)
            raise
        with connection:
            send_at_once(connection)
            return StartedActor(actor, running, socket.socket(fileno=os.dup(connection.fileno())))

    def _wait(self, number: int, told: Any) -> tuple[str, int]:
        """The address of a replica. It may take long: until a node has room, which perhaps has to be started first."""
        ray, tell_at = package(), time.monotonic() + TELL_SECONDS
        cpus, gpus = self.room
        what = f"a node of the Ray cluster with room for {cpus} CPUs (ray_cpus) and {gpus} GPUs (ray_gpus)"
        self.waits[number] = what
        try:
            while not ray.wait([told], timeout=LOOK_SECONDS)[0]:
                if self._is_closed:
                    raise EngineClosed(f"the engine was closed while replica {number} waited for {what}")
                if time.monotonic() > tell_at:
                    tell_at += TELL_SECONDS
                    logger.warning("replica %d waits for %s; free are %s", number, what, ray.available_resources())
        finally:
            del self.waits[number]
        host, port = ray.get(told)
        return host, port

    def close(self) -> None:
        """Let starts that wait for room raise."""
        self._is_closed = True


def send_at_once(connection: Connection[Any, Any]) -> None:
    """Turn off Nagle's algorithm: a short message does not wait for the next one."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
