"""The worker process as a capability: the policy stays here, and everything with tensors is elsewhere."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from nanoengine.core.capability import Capability
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.sequence import Request
from nanoengine.worker.options import WorkerOptions
from nanoengine.worker.remote_runner import RemoteRunner, WorkerLost

if TYPE_CHECKING:
    from nanoengine.core.model_runner import ModelRunner
    from nanoengine.core.qwen3 import Decoder
    from nanoengine.core.startup import Startup

logger = logging.getLogger("nanoengine")

REFUSED = ("preemption_mode", "kv_host_memory", "kv_disk_path", "draft_model")
"""Options of capabilities whose policy looks at the runner's tensors."""


class Worker(Capability):
    """It must be the first capability: it takes the model and the runner away from the others."""

    options = WorkerOptions

    def describe(self, startup: Startup) -> None:
        if not startup.config.of(WorkerOptions).worker_process:
            return
        self._check(startup)
        others = [own for own in startup.capabilities if own is not self]
        startup.capabilities = [self, *(cast(Capability, WithoutRunner(own)) for own in others)]
        startup.new_runner = partial(_new_runner, startup)  # type: ignore[method-assign]
        startup._new_engine = partial(_new_engine, startup, startup._new_engine)  # type: ignore[method-assign]

    def model(self, startup: Startup) -> Decoder | None:
        is_used = startup.config.of(WorkerOptions).worker_process
        return cast("Decoder", self) if is_used else None  # nobody here looks at it

    def _check(self, startup: Startup) -> None:
        for kind in startup.config.options.values():
            for own in dataclasses.fields(kind):
                if own.name in REFUSED and getattr(kind, own.name) not in (None, own.default):
                    raise InvalidConfig(
                        f"{own.name} is not computed by a worker process: leave it out, or worker_process"
                    )
        if startup.config.device.startswith("cuda") and startup.config.num_kv_blocks is None:
            raise InvalidConfig("worker_process on a GPU needs num_kv_blocks: only the worker could measure it")


class WithoutRunner:
    """A capability, but for what it adds to the runner."""

    def __init__(self, own: Capability):
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def runner(self, startup: Startup) -> None: ...


def _new_runner(startup: Startup, num_blocks: int, _: int) -> ModelRunner:
    """A worker with a pool of so many blocks; from them it knows, too, how long a sequence may be."""
    config = startup.config
    own = config.of(WorkerOptions)
    same = dataclasses.replace(
        config,
        num_kv_blocks=num_blocks,
        kv_cache_memory=None,
        options={**config.options, WorkerOptions: WorkerOptions()},
    )
    return cast("ModelRunner", RemoteRunner(same, own.worker_step_seconds, use_tqdm=startup.use_tqdm))


def _new_engine(startup: Startup, new_engine: Callable[[], LLMEngine]) -> LLMEngine:
    """An engine that starts a lost worker anew; its K/V is lost, and recomputed."""
    engine, remote = new_engine(), cast(RemoteRunner, startup.runner)
    step = engine.step

    def step_or_resume() -> list[Request]:
        advanced: list[Request] = []
        try:
            advanced = step()
        except WorkerLost as lost:
            logger.warning("%s: it is started anew, and %d requests go on", lost, len(engine.requests))
        if not remote.is_alive:
            remote.start()
            engine.scheduler.blocks.reset()
        return advanced

    engine.step = step_or_resume  # type: ignore[method-assign]
    return engine
