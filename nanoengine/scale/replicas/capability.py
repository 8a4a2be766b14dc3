"""Replicas as a capability: requests, text and checks stay in this process, and the engines are in others."""

from __future__ import annotations

import dataclasses
import os
import secrets
from typing import TYPE_CHECKING, cast

import torch

from nanoengine.cgroups import within_quota
from nanoengine.core.capability import Capability
from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidConfig
from nanoengine.scale.replicas.carrier import Carrier, LocalCarrier
from nanoengine.scale.replicas.engine import ReplicatedEngine
from nanoengine.scale.replicas.observer import ReplicaObserver
from nanoengine.scale.replicas.options import ReplicaOptions, num_ranks_of, num_replicas_of, option_of
from nanoengine.scale.worker.elsewhere import NOT_THERE, check_shared, replaced, take_model_away
from nanoengine.sizes import told

if TYPE_CHECKING:
    from nanoengine.core.llm_engine import LLMEngine
    from nanoengine.core.model_runner import ModelRunner
    from nanoengine.core.qwen3 import DenseDecoder
    from nanoengine.core.startup import Startup


OF_REPLICAS = ("ParallelOptions", "KVOffloadOptions", "SpeculationOptions")
"""Options without a meaning in this process, which computes nothing."""

SNAPSHOT_MEMORY = "snapshot_memory"
"""An option of `kv_groups`, which writes its choice into `Startup.config`."""

MOST_LORA_BYTES = (1 << 31) - (1 << 20)
"""Limit of the adapters, which go to a replica in one message."""


class Replicas(Capability):
    """It must be the first capability: it takes the model and the runner away from the others.

    Attributes:
        computes: in the process of a replica, the kernels and the dtype, on which the bits of its numbers depend.
    """

    options = ReplicaOptions
    computes = ""
    is_used = False

    def describe(self, startup: Startup) -> None:
        count = num_replicas_of(startup.config)
        if not count:
            return
        self.is_used, config = True, replaced(startup.config, {"replicas": count})
        check_lora_bytes(config)
        is_on_gpus = startup.new_carrier is None and config.device != "cpu"
        self._num_gpus = gpus_of_each(config, torch.cuda.device_count() if is_on_gpus else 0)
        startup.gpus_elsewhere = self._num_gpus > 0
        options = {kind: kind() if kind.__name__ in OF_REPLICAS else own for kind, own in config.options.items()}
        startup.config, self._asked = dataclasses.replace(config, device="cpu", options=options), config
        self._others = take_model_away(startup, self)

    def model(self, startup: Startup) -> DenseDecoder | None:
        if not self.is_used:
            return None
        check_shared(startup, num_ranks_of(self._asked))
        return cast("DenseDecoder", self)  # nobody in this process looks at it

    def new_runner(self, startup: Startup) -> ModelRunner | None:
        return cast("ModelRunner", NoRunner()) if self.is_used else None

    def new_engine(self, startup: Startup) -> LLMEngine | None:
        if not self.is_used:
            return None
        asked, others = self._asked, self._others
        adapters = next((found for own in others if (found := getattr(own, "adapters", None)) is not None), None)
        options, carrier = asked.of(ReplicaOptions), self._carrier(startup)
        engine = ReplicatedEngine(startup.new_engine(), carrier, options, seed=asked.seed, adapters=adapters)
        observer = next(own for own in others if hasattr(own, "metrics"))  # the last capability is there
        observer.metrics = ReplicaObserver(observer.metrics, engine.supervisor)
        return engine

    def _carrier(self, startup: Startup) -> Carrier:
        hash_seed, asked = secrets.randbits(64), self._asked
        if startup.new_carrier is not None:
            return startup.new_carrier(hash_seed)
        told = dataclasses.replace(asked, block_size=startup.block_size)  # as where their blocks are looked up
        memory = option_of(startup.config, SNAPSHOT_MEMORY) if option_of(asked, SNAPSHOT_MEMORY) is None else None
        each = config_of_each(told, startup.num_blocks, memory, has_gpus=self._num_gpus > 0)
        return LocalCarrier(each, hash_seed, num_gpus=self._num_gpus, use_tqdm=startup.use_tqdm)

    def policy(self, startup: Startup) -> None:
        self.computes = f"{startup.kernels.name} {startup.kernels.fingerprint}, {startup.dtype}"


class NoRunner:
    """In place of a runner: this process computes nothing."""

    recorder = None


def check_lora_bytes(config: EngineConfig) -> None:
    """Raise InvalidConfig if adapters may be larger than a message to a replica."""
    size = option_of(config, "max_lora_bytes")
    if option_of(config, "enable_lora") and size > MOST_LORA_BYTES:
        raise InvalidConfig(
            f"max_lora_bytes is {told(size)}, but replicas take at most {told(MOST_LORA_BYTES)} of adapters: lower it"
        )


def gpus_of_each(config: EngineConfig, num_gpus: int) -> int:
    """GPUs of each replica, one for each of its ranks, where this process sees `num_gpus`; raises InvalidConfig if these are too
    few.
    """
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
    """The options of each replica: on a CPU they share its cores, and the memory that one engine would take for K/V and for
    states. A single replica looks for itself what is free.

    Args:
        num_blocks: of the KV pool of one engine here.
        snapshot_memory: that one engine would take here; None: none, or what the options say.
        has_gpus: each has a GPU, and sees no other.
    """
    count = num_replicas_of(config)
    own = replaced(config, NOT_THERE | {"replicas": 0})
    if has_gpus:
        return dataclasses.replace(own, device="cuda")
    if config.num_threads is None:
        own = dataclasses.replace(own, num_threads=max(1, within_quota(len(os.sched_getaffinity(0))) // count))
    if count > 1 and config.num_kv_blocks is None and config.kv_cache_memory is None:
        own = dataclasses.replace(own, num_kv_blocks=max(1, num_blocks // count))
    if snapshot_memory is not None:
        own = replaced(own, {SNAPSHOT_MEMORY: snapshot_memory // count})
    return own
