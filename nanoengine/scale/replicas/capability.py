"""Replicas as a capability: this process, the front, has requests, text and checks; other processes have the engines."""

from __future__ import annotations

import dataclasses
import os
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from nanoengine.cgroups import within_quota
from nanoengine.core.capability import Capability
from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidConfig
from nanoengine.scale.replicas.carrier import Carrier, LocalCarrier
from nanoengine.scale.replicas.engine import ReplicatedEngine
from nanoengine.scale.replicas.observer import ReplicaObserver
from nanoengine.scale.replicas.options import ReplicaOptions, num_ranks_of, num_replicas_of, option_of
from nanoengine.scale.worker.remote_model_options import FRONT_ONLY, check_shared, replaced
from nanoengine.sizes import format_bytes

if TYPE_CHECKING:
    from nanoengine.core.llm_engine import LLMEngine
    from nanoengine.core.model_runner import ModelRunner
    from nanoengine.core.qwen3 import DenseDecoder
    from nanoengine.core.startup import Startup


REPLICA_ONLY = ("ParallelOptions", "KVOffloadOptions", "SpeculationOptions")
"""Options without effect in the front, which computes nothing."""

SNAPSHOT_MEMORY = "snapshot_memory"
"""An option of `kv_groups`, which writes its choice into `Startup.config`."""

MOST_LORA_BYTES = (1 << 31) - (1 << 20)
"""Limit of the adapters, which a replica receives in one message."""


class Replicas(Capability):
    """Replicas at start-up. The front has neither model nor runner; it must come before the capabilities that make them.

    Attributes:
        computes: kernels and dtype of a replica, on which the bits of its numbers depend.
    """

    options = ReplicaOptions
    computes = ""
    is_used = False
    recorder = None  # as in a runner, of which the front has none

    def describe(self, startup: Startup) -> None:
        count = num_replicas_of(startup.config)
        if not count:
            return
        self.is_used, config = True, replaced(startup.config, {"replicas": count})
        check_lora_bytes(config)
        is_on_gpus = startup.new_carrier is None and config.device != "cpu"
        self._num_gpus = gpus_of_each(config, torch.cuda.device_count() if is_on_gpus else 0)
        startup.gpus_elsewhere = self._num_gpus > 0
        options = {kind: kind() if kind.__name__ in REPLICA_ONLY else chosen for kind, chosen in config.options.items()}
        startup.config, self._config = dataclasses.replace(config, device="cpu", options=options), config
        startup.runner_elsewhere = True

    def model(self, startup: Startup) -> DenseDecoder | None:
        if not self.is_used:
            return None
        check_shared(startup, num_ranks_of(self._config))
        return cast("DenseDecoder", self)  # a placeholder: this process computes nothing

    def new_runner(self, startup: Startup) -> ModelRunner | None:
        return cast("ModelRunner", self) if self.is_used else None

    def new_engine(self, startup: Startup) -> LLMEngine | None:
        if not self.is_used:
            return None
        parts: Any = startup.capabilities
        adapters = next((part.adapters for part in parts if getattr(part, "adapters", None) is not None), None)
        options, carrier = self._config.of(ReplicaOptions), self._carrier(startup)
        engine = cast(ReplicatedEngine, startup.new_engine(partial(ReplicatedEngine, carrier, options, adapters)))
        observer = next(part for part in parts if hasattr(part, "metrics"))  # replicas need this capability
        observer.metrics = ReplicaObserver(observer.metrics, engine.supervisor)
        return engine

    def _carrier(self, startup: Startup) -> Carrier:
        hash_seed, config = secrets.randbits(64), self._config
        if startup.new_carrier is not None:
            return startup.new_carrier(hash_seed)
        sized = dataclasses.replace(config, block_size=startup.block_size)  # equal hashes of blocks here and there
        memory = option_of(startup.config, SNAPSHOT_MEMORY) if option_of(config, SNAPSHOT_MEMORY) is None else None
        each = config_of_each(sized, startup.num_blocks, memory, has_gpus=self._num_gpus > 0)
        return LocalCarrier(each, hash_seed, num_gpus=self._num_gpus, use_tqdm=startup.use_tqdm)

    def policy(self, startup: Startup) -> None:
        self.computes = f"{startup.kernels.name} {startup.kernels.fingerprint}, {startup.dtype}"


def check_lora_bytes(config: EngineConfig) -> None:
    """Raise InvalidConfig for a limit of adapters above the limit of a message to a replica."""
    size = option_of(config, "max_lora_bytes")
    if option_of(config, "enable_lora") and size > MOST_LORA_BYTES:
        raise InvalidConfig(
            f"max_lora_bytes is {format_bytes(size)}, but replicas take at most {format_bytes(MOST_LORA_BYTES)} of adapters:"
            " lower it"
        )


def gpus_of_each(config: EngineConfig, num_gpus: int) -> int:
    """GPUs of each replica, one for each of its ranks; raises InvalidConfig if `num_gpus` of this process are too few."""
    count, num_ranks = num_replicas_of(config), num_ranks_of(config)
    if 0 < num_gpus < count * num_ranks:
        raise InvalidConfig(
            f"replicas is {count}, and torch sees {num_gpus} GPUs, of which each takes {num_ranks}: lower it, or set device to "
            "cpu"
        )
    return num_ranks if num_gpus else 0


def config_of_each(
    config: EngineConfig, num_blocks: int, snapshot_memory: int | None = None, *, has_gpus: bool
) -> EngineConfig:
    """The options of each replica. On a CPU, replicas have equal parts of its cores, and of the memory of one engine for K/V and
    for states. A single replica measures the free memory itself.

    Args:
        num_blocks: of the KV pool of one engine here.
        snapshot_memory: of one engine here; None: none, or as in the options.
        has_gpus: each has a GPU, and sees no other.
    """
    count = num_replicas_of(config)
    each = replaced(config, FRONT_ONLY | {"replicas": 0})
    if has_gpus:
        return dataclasses.replace(each, device="cuda")
    if config.num_threads is None:
        each = dataclasses.replace(each, num_threads=max(1, within_quota(len(os.sched_getaffinity(0))) // count))
    if count > 1 and config.num_kv_blocks is None and config.kv_cache_memory is None:
        each = dataclasses.replace(each, num_kv_blocks=max(1, num_blocks // count))
    if snapshot_memory is not None:
        each = replaced(each, {SNAPSHOT_MEMORY: snapshot_memory // count})
    return each
