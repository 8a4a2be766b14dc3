"""RayCarrier: replicas as actors of a Ray cluster.

Ray chooses a node with room for a replica, starts a process there, and returns its address. Messages go over a socket between the
two processes: no token passes Ray. Ray restarts nothing and tries nothing again (`max_restarts=0`, `max_task_retries=0`):
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
from nanoengine.scale.ray.resources import Resources

logger = logging.getLogger("nanoengine")

LOOK_SECONDS = 0.5
"""Interval at which a start that waits for room checks whether the engine was closed."""

LOG_SECONDS = 30.0
"""Interval at which a start that waits for room writes a line to the log."""


class RayReplica:
    """An actor of Ray: a process on a node, which listens for the front."""

    def listen(self, key: bytes) -> tuple[str, int]:
        """Listen for the front, which has the key; returns (host, port)."""
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
    """A running actor; see `StartedReplica`."""

    first_message = None  # Ray has sent it the config

    def __init__(self, actor: Any, running: Any, connected: socket.socket):
        self.actor, self.socket = actor, connected
        self._running = running  # Ray drops the call without this reference

    def kill(self) -> None:
        package().kill(self.actor)

    def ending(self) -> str:
        return "was lost: its actor or its node has ended"


class RayCarrier:
    """Carrier of replicas on a Ray cluster; see `Carrier`.

    Args:
        config: of each replica's engine.
        resources: CPUs and GPUs of each replica.
        hash_seed: of the hashes in the prefix caches of all replicas.
    """

    def __init__(self, config: EngineConfig, resources: Resources, hash_seed: int):
        self.config, self.resources, self.hash_seed = config, resources, hash_seed
        self.waits: dict[int, str] = {}
        self._key = secrets.token_bytes(32)  # messages are pickled: no other process may send any
        self._is_closed = False
        options = {**resources._asdict(), "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": "SPREAD"}
        self._actor_class = package().remote(RayReplica).options(**options)

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

    def _wait(self, number: int, address: Any) -> tuple[str, int]:
        """The address of a replica. The wait lasts until a node has room, which perhaps has to be started first."""
        ray, log_at = package(), time.monotonic() + LOG_SECONDS
        cpus, gpus = self.resources
        missing = f"a node of the Ray cluster with room for {cpus} CPUs (ray_cpus) and {gpus} GPUs (ray_gpus)"
        self.waits[number] = missing
        try:
            while not ray.wait([address], timeout=LOOK_SECONDS)[0]:
                if self._is_closed:
                    raise EngineClosed(f"the engine was closed while replica {number} waited for {missing}")
                if time.monotonic() > log_at:
                    log_at += LOG_SECONDS
                    logger.warning("replica %d waits for %s; free are %s", number, missing, ray.available_resources())
        finally:
            del self.waits[number]
        host, port = ray.get(address)
        return host, port

    def close(self) -> None:
        """End the wait of all starts: they raise EngineClosed."""
        self._is_closed = True


def send_at_once(connection: Connection[Any, Any]) -> None:
    """Turn off Nagle's algorithm: a short message does not wait for the next one."""
    with socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
