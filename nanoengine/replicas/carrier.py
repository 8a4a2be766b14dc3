"""Carriers: where replicas run. A carrier starts one and connects to it; all else is said in messages on that connection."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from typing import Protocol

from nanoengine.core.config import EngineConfig
from nanoengine.worker.child import end_children, ending_of, start_child
from nanoengine.worker.link import framed

SEND_SECONDS = 60.0
"""How long a replica may take to read the config that is sent first."""


class Started(Protocol):
    """A replica that was started, perhaps not ready yet."""

    socket: socket.socket
    """Connected to it, and the caller's from now on: `Ready` or `Failed` comes first. `process.serve` is at its other end."""

    def kill(self) -> None:
        """End it at once, whatever it does; also called when it has ended by itself."""
        ...

    def ending(self) -> str:
        """How one has ended that closed its socket: "was killed by SIGKILL"."""
        ...


class Carrier(Protocol):
    waits: dict[int, str]
    """By the numbers of replicas whose `start` waits: for what."""

    def start(self, number: int) -> Started:
        """Start a replica and connect to it; called in a thread of its own, and may take long.

        Args:
            number: which one it is, from 0; one that was lost is started anew under its number.

        Raises:
            Exception: it cannot be started.
        """
        ...

    def close(self) -> None:
        """No more are wanted: a `start` that waits for something else may raise. From any thread."""
        ...


class LocalReplica:
    """A process on this machine."""

    def __init__(self, process: subprocess.Popen[bytes], own: socket.socket):
        self.process, self.socket = process, own

    def kill(self) -> None:
        end_children(self.process)

    def ending(self) -> str:
        return ending_of(self.process)


def gpu_of(number: int, environment: Mapping[str, str]) -> dict[str, str]:
    """What lets a replica see one GPU: of those that this process sees, the one with its number."""
    seen = environment.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": seen.split(",")[number] if seen else f"{number}"}


class LocalCarrier:
    """Processes on this machine.

    Args:
        config: of each replica's engine.
        hash_seed: of the prefix caches of all.
        has_gpus: each sees one GPU, that of its number.
        use_tqdm: the first one shows what its start-up is doing.
    """

    def __init__(self, config: EngineConfig, hash_seed: int, *, has_gpus: bool = False, use_tqdm: bool = False):
        self.config, self.hash_seed, self.has_gpus, self.use_tqdm = config, hash_seed, has_gpus, use_tqdm
        self.waits: dict[int, str] = {}

    def start(self, number: int) -> LocalReplica:
        gpu = gpu_of(number, os.environ) if self.has_gpus else None
        process, own = start_child("nanoengine.replicas.process", environment=gpu)
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
