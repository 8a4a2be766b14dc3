"""The worker process as a capability: the policy stays here, and everything with tensors is elsewhere."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from nanoengine.core.capability import Capability
from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.sequence import Request
from nanoengine.scale.worker.member import NOT_THERE, Member, replaced
from nanoengine.scale.worker.options import WorkerOptions
from nanoengine.scale.worker.remote_runner import RemoteRunner, WorkerLost

if TYPE_CHECKING:
    from nanoengine.core.model_runner import ModelRunner
    from nanoengine.core.qwen3 import DenseDecoder
    from nanoengine.core.startup import Startup

logger = logging.getLogger("nanoengine")

REFUSED = ("preemption_mode", "kv_host_memory", "kv_disk_path", "draft_model")
"""Options of capabilities whose policy reads the tensors of the runner, which are in another process here."""


class Worker(Capability):
    """It must stand before the capabilities that run in a worker: it takes the model and the runner away from them.

    `startup.num_ranks` says how many processes share the model, if it is not one.
    """

    options = WorkerOptions
    is_used = False

    def describe(self, startup: Startup) -> None:
        config = startup.config
        is_wanted = config.of(WorkerOptions).worker_process or startup.num_ranks > 1
        self.is_used = is_wanted and Member not in config.options  # a worker has none of its own
        if not self.is_used:
            return
        refuse(
            config,
            REFUSED,
            "is not computed by a worker process: leave it out, or worker_process and tensor_parallel_size",
        )
        others = [own for own in startup.capabilities if own is not self]
        startup.capabilities = [self, *(cast(Capability, WithoutRunner(own)) for own in others)]
        startup.new_runner = partial(_new_runner, startup)  # type: ignore[method-assign]
        startup._new_engine = partial(_new_engine, startup, startup._new_engine)  # type: ignore[method-assign]

    def model(self, startup: Startup) -> DenseDecoder | None:
        if not self.is_used:
            return None
        config = startup.config
        if startup.device.is_cuda and config.num_kv_blocks is None and config.kv_cache_memory is None:
            raise InvalidConfig(
                "worker processes on GPUs need num_kv_blocks or kv_cache_memory: only they could measure it"
            )
        return cast("DenseDecoder", self)  # nobody here looks at it


class WithoutRunner:
    """Forwards to a capability, but its hook `runner` does nothing: the runner is in another process."""

    def __init__(self, own: Capability):
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def runner(self, startup: Startup) -> None: ...


def _new_runner(startup: Startup, num_blocks: int, _: int) -> ModelRunner:
    """Workers with pools of so many blocks; from them they know, too, how long a sequence may be."""
    config, size = startup.config, startup.num_ranks
    threads = startup.device.num_threads  # of this process, which computes nothing
    same = dataclasses.replace(
        replaced(config, NOT_THERE),
        device=startup.device.torch_device.type if size > 1 else config.device,
        num_threads=config.num_threads if size == 1 else max(1, threads // size),
        num_kv_blocks=num_blocks,
        kv_cache_memory=None,
        block_size=startup.block_size,
    )
    return cast("ModelRunner", RemoteRunner(same, size, config.of(WorkerOptions), use_tqdm=startup.use_tqdm))


def _new_engine(startup: Startup, new_engine: Callable[[], LLMEngine]) -> LLMEngine:
    engine = new_engine()
    resume_if_lost(engine, cast(RemoteRunner, startup.runner))
    return engine


def resume_if_lost(engine: LLMEngine, remote: RemoteRunner) -> None:
    """Make an engine start another worker in place of a lost one, as soon as it has requests; their K/V is computed again."""

    def restart() -> None:
        if remote.is_alive or not engine.requests:
            return
        guard = getattr(engine.executor, "guard", None)  # Ctrl-C may end the wait: the next step starts a worker again
        with guard.allowed() if guard is not None else nullcontext():
            remote.restart()
        engine.scheduler.blocks.reset()

    def resuming(call: Callable[[], Any]) -> Callable[[], Any]:
        def call_or_resume() -> Any:
            advanced: list[Request] = []
            restart()
            try:
                advanced = call()
            except WorkerLost as lost:
                logger.warning("%s: %d requests go on in another one", lost, len(engine.requests))
            restart()
            return advanced

        return call_or_resume

    # Both methods wait for steps in flight, so both may find that the worker is lost.
    engine.step, engine._settle_if_idle = resuming(engine.step), resuming(engine._settle_if_idle)  # type: ignore[method-assign]


def refuse(config: EngineConfig, names: Collection[str], why: str) -> None:
    """InvalidConfig if one of these options has another value than its default."""
    for own in config.options.values():
        for name in names:
            if hasattr(own, name) and getattr(own, name) not in (None, getattr(type(own)(), name)):
                raise InvalidConfig(f"{name} {why}")
