"""Carriers start replicas, on this machine or elsewhere, and connect to them. All that follows are messages on the connection."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from typing import Protocol

from nanoengine.core.config import EngineConfig
from nanoengine.scale.worker.child import end_children, ending_of, start_child
from nanoengine.scale.worker.link import framed

SEND_SECONDS = 60.0
"""How long a replica may take to read the config, which is the first message."""


class Started(Protocol):
    """A replica that was started, perhaps not ready yet."""

    socket: socket.socket
    """The connection to the replica, which the caller closes. `process.serve` is at its other end."""

    def kill(self) -> None:
        """End the replica at once; also called when it has ended by itself."""
        ...

    def ending(self) -> str:
        """How a replica ended whose socket is closed, such as "was killed by SIGKILL"."""
        ...


class Carrier(Protocol):
    waits: dict[int, str]
    """By the number of a replica whose `start` waits, the thing that it waits for."""

    def start(self, number: int) -> Started:
        """Start a replica and connect to it; called in a thread of its own, and may take long.

        Args:
            number: of the slot, from 0; a replica in place of a lost one has the same number.

        Raises:
            Exception: the replica cannot be started.
        """
        ...

    def close(self) -> None:
        """No more replicas are wanted: a `start` that waits may raise. From any thread."""
        ...


class LocalReplica:
    """A process on this machine."""

    def __init__(self, process: subprocess.Popen[bytes], own: socket.socket):
        self.process, self.socket = process, own

    def kill(self) -> None:
        end_children(self.process)

    def ending(self) -> str:
        return ending_of(self.process)


def gpus_of(number: int, count: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment in which the replica of a number sees so many GPUs: those of this process are dealt out in their order."""
    seen = environment.get("CUDA_VISIBLE_DEVICES")
    places = range(number * count, (number + 1) * count)
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen.split(",")[place] if seen else f"{place}" for place in places)}


class LocalCarrier:
    """Processes on this machine.

    Args:
        config: of each replica's engine.
        hash_seed: of the hashes in the prefix caches of all replicas.
        num_gpus: that each replica sees, for itself.
        use_tqdm: the first replica shows the progress of its start-up.
    """

    def __init__(self, config: EngineConfig, hash_seed: int, *, num_gpus: int = 0, use_tqdm: bool = False):
        self.config, self.hash_seed, self.num_gpus, self.use_tqdm = config, hash_seed, num_gpus, use_tqdm
        self.waits: dict[int, str] = {}

    def start(self, number: int) -> LocalReplica:
        gpus = gpus_of(number, self.num_gpus, os.environ) if self.num_gpus else None
        process, own = start_child("nanoengine.scale.replicas.process", environment=gpus)
        started = LocalReplica(process, own)
        try:
            own.settimeout(SEND_SECONDS)
            own.sendall(framed((self.config, self.use_tqdm and number == 0, self.hash_seed)))
        except BaseException:
            own.close()
            started.kill()
            raise
        self.use_tqdm = False
        return started

    def close(self) -> None: ...
