"""`python -m tests.scale.replicas.toy_process FD SECONDS`: a replica in a process, whose engine has no tensors; and its
carrier.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, cast

from nanoengine.builder import Built
from nanoengine.core.block_manager import BlockManager
from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import EngineDead
from nanoengine.core.messages import StepPlan
from nanoengine.features.observability.kv_events import KVEventPublisher
from nanoengine.features.observability.observer import Observer
from nanoengine.scale.replicas.carrier import LocalReplica
from nanoengine.scale.replicas.engine import ReplicatedEngine
from nanoengine.scale.replicas.options import ReplicaOptions
from nanoengine.scale.replicas.process import serve
from tests.core.toys import Done, ToyModel, make_engine
from tests.forks import begin
from tests.serve.aio.toys import LogprobListener

from .world import BLOCK_SIZE, HASH_SEED, replicated

DIES_AT_START = -1.0

ENDLESS = [47] * 3
"""The step of a prompt that begins so never ends."""

LOSES_A_RANK = [46] * 3
"""In the step of a prompt that begins so, a rank is lost."""


class SlowModel(ToyModel):
    """Each step takes some time, so that a signal can come before the end."""

    def __init__(self, seconds: float):
        super().__init__(BLOCK_SIZE)
        self.seconds = seconds

    def launch(self, plan: StepPlan) -> Done:
        time.sleep(self.seconds)
        for start in plan.started:
            while start.token_ids[:3] == ENDLESS:
                time.sleep(1.0)
            if start.token_ids[:3] == LOSES_A_RANK:
                raise EngineDead("rank 1 is gone")
        return super().launch(plan)


def build(seconds: float) -> Built:
    if seconds == DIES_AT_START:
        os._exit(3)
    time.sleep(min(seconds, 0.0))
    events = KVEventPublisher()
    blocks = BlockManager(400, BLOCK_SIZE, stores=[events])
    engine = make_engine(blocks=blocks, model=SlowModel(seconds), parts=[LogprobListener()], policy="mixed")
    observer = Observer(engine.max_model_len)
    observer.events = events
    engine.scheduler.parts.append(observer)
    own = {"replicas": SimpleNamespace(computes="toys")}
    return cast(
        Built, SimpleNamespace(config=EngineConfig(model="toys"), engine=engine, metrics=observer, capabilities=own)
    )


class ToyCarrier:
    """Starts such processes.

    Args:
        seconds: of each step.
    """

    def __init__(self, seconds: float = 0.002):
        self.seconds = seconds
        self.started: list[LocalReplica] = []
        self.waits: dict[int, str] = {}

    def start(self, number: int) -> LocalReplica:
        own, other = socket.socketpair()
        with other:
            command = ["-m", "tests.scale.replicas.toy_process", str(other.fileno()), str(self.seconds)]
            process = begin(command, other.fileno())
        self.started.append(LocalReplica(process, own))
        return self.started[-1]

    def close(self) -> None: ...


def toy_replicas(count: int, carrier: ToyCarrier | None = None, **options: Any) -> ReplicatedEngine:
    return replicated(carrier or ToyCarrier(), ReplicaOptions(replicas=count, **options))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), lambda: build(float(sys.argv[2])), HASH_SEED)
