"""Carriers: they start replicas, on this machine or on another, and connect to them."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from typing import Any, Protocol

from nanoengine.core.config import EngineConfig
from nanoengine.scale.worker.child import end_children, ending_of, start_child


class StartedReplica(Protocol):
    """A process of a replica, perhaps not ready yet."""

    socket: socket.socket
    """The connection to the replica, which the caller closes. `process.serve` is at its other end."""

    first_message: Any
    """Sent to the replica at once; None: nothing is sent."""

    def kill(self) -> None:
        """End the replica at once; also called when it has ended by itself."""
        ...

    def ending(self) -> str:
        """Text about the end of a replica whose socket is closed, such as "was killed by SIGKILL"."""
        ...


class Carrier(Protocol):
    """Starts replicas."""

    waits: dict[int, str]
    """Number of a replica whose `start` waits -> the missing resource."""

    def start(self, number: int) -> StartedReplica:
        """Start a replica and connect to it; called in a separate thread, and may take long.

        Args:
            number: of the slot, from 0; the successor of a lost replica has the same number.

        Raises:
            Exception: the replica cannot be started.
        """
        ...

    def close(self) -> None:
        """No more replicas are wanted: a `start` that waits may raise. From any thread."""
        ...


class LocalReplica:
    """A process on this machine."""

    def __init__(self, process: subprocess.Popen[bytes], connected: socket.socket, first_message: Any = None):
        self.process, self.socket, self.first_message = process, connected, first_message

    def kill(self) -> None:
        end_children(self.process)

    def ending(self) -> str:
        return ending_of(self.process)


def gpus_of(number: int, count: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of replica `number` with `count` GPUs: the next ones of this process, in their order."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    indices = range(number * count, (number + 1) * count)
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[i] if visible else f"{i}" for i in indices)}


class LocalCarrier:
    """Carrier of replicas as processes on this machine; see `Carrier`.

    Args:
        config: of each replica's engine.
        hash_seed: of the hashes in the prefix caches of all replicas.
        num_gpus: of each replica, which has them for itself.
        use_tqdm: the first replica shows the progress of its start-up.
    """

    def __init__(self, config: EngineConfig, hash_seed: int, *, num_gpus: int = 0, use_tqdm: bool = False):
        self.config, self.hash_seed, self.num_gpus, self.use_tqdm = config, hash_seed, num_gpus, use_tqdm
        self.waits: dict[int, str] = {}

    def start(self, number: int) -> LocalReplica:
        gpus = gpus_of(number, self.num_gpus, os.environ) if self.num_gpus else None
        process, connected = start_child("nanoengine.scale.replicas.process", environment=gpus)
        use_tqdm, self.use_tqdm = self.use_tqdm and number == 0, False
        return LocalReplica(process, connected, (self.config, use_tqdm, self.hash_seed))

    def close(self) -> None: ...
