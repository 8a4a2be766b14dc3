"""Replicas as a capability: requests, text and checks stay in this process, and the engines are in others."""

from __future__ import annotations

import dataclasses
import os
import secrets
from typing import TYPE_CHECKING, Any, cast

import torch

from nanoengine.core.capability import Capability
from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.scale.replicas.carrier import Carrier, LocalCarrier
from nanoengine.scale.replicas.engine import ReplicatedEngine
from nanoengine.scale.replicas.observer import ReplicaObserver
from nanoengine.scale.replicas.options import ReplicaOptions, option_of
from nanoengine.scale.worker.capability import WithoutRunner
from nanoengine.scale.worker.member import NOT_THERE, replaced
from nanoengine.sizes import told

if TYPE_CHECKING:
    from nanoengine.core.model_runner import ModelRunner
    from nanoengine.core.qwen3 import DenseDecoder
    from nanoengine.core.startup import Startup


OF_REPLICAS = ("ParallelOptions", "WorkerOptions", "KVOffloadOptions", "SpeculationOptions")
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

    def describe(self, startup: Startup) -> None:
        config = startup.config
        if not config.of(ReplicaOptions).replicas:
            return
        check_lora_bytes(config)
        new_carrier = startup.new_carrier
        is_on_gpus = new_carrier is None and config.device != "cpu"
        has_gpus = check_gpus(config, torch.cuda.device_count() if is_on_gpus else 0)
        options = {kind: kind() if kind.__name__ in OF_REPLICAS else own for kind, own in config.options.items()}
        startup.config = dataclasses.replace(config, device="cpu", options=options)
        others = [own for own in startup.capabilities if own is not self]
        startup.capabilities = [self, *(cast(Capability, WithoutRunner(own)) for own in others)]
        startup.new_runner = lambda *_: cast("ModelRunner", NoRunner())  # type: ignore[method-assign]
        make_engine = startup._new_engine

        def new_engine() -> LLMEngine:
            told = dataclasses.replace(config, block_size=startup.block_size)  # as where their blocks are looked up
            hash_seed = secrets.randbits(64)
            if new_carrier is not None:
                carrier: Carrier = new_carrier(hash_seed)
            else:
                memory = (
                    option_of(startup.config, SNAPSHOT_MEMORY) if option_of(config, SNAPSHOT_MEMORY) is None else None
                )
                each = config_of_each(told, startup.num_blocks, memory, has_gpus=has_gpus)
                carrier = LocalCarrier(each, hash_seed, has_gpus=has_gpus, use_tqdm=startup.use_tqdm)
            adapters = next((found for own in others if (found := getattr(own, "adapters", None)) is not None), None)
            options = config.of(ReplicaOptions)
            engine = ReplicatedEngine(make_engine(), carrier, options, seed=config.seed, adapters=adapters)
            observer = next(own for own in others if hasattr(own, "metrics"))  # the last capability is there
            observer.metrics = ReplicaObserver(observer.metrics, engine.supervisor)
            return engine

        startup._new_engine = new_engine  # type: ignore[method-assign]

    def model(self, startup: Startup) -> DenseDecoder | None:
        is_used = startup.config.of(ReplicaOptions).replicas > 0
        return cast("DenseDecoder", self) if is_used else None  # nobody here looks at it

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


def check_gpus(config: EngineConfig, num_gpus: int) -> bool:
    """Whether replicas compute on GPUs; raises InvalidConfig if there are not enough of them."""
    count = config.of(ReplicaOptions).replicas
    if 0 < num_gpus < count:
        raise InvalidConfig(
            f"replicas is {count}, and torch sees {num_gpus} GPUs, of which each takes one: lower it, or set device to cpu"
        )
    return num_gpus > 0


def config_of_each(
    config: EngineConfig, num_blocks: int, snapshot_memory: int | None = None, *, has_gpus: bool
) -> EngineConfig:
    """The options of each replica: on a CPU they share its cores, and the memory that one engine would take for K/V and for
    states.

    Args:
        num_blocks: of the KV pool of one engine here.
        snapshot_memory: that one engine would take here; None: none, or what the options say.
        has_gpus: each has a GPU, and sees no other.
    """
    options: dict[type, Any] = {**replaced(config, NOT_THERE).options, ReplicaOptions: ReplicaOptions()}
    own = dataclasses.replace(config, options=options)
    if has_gpus:
        return dataclasses.replace(own, device="cuda")
    count = config.of(ReplicaOptions).replicas
    if config.num_threads is None:
        own = dataclasses.replace(own, num_threads=max(1, len(os.sched_getaffinity(0)) // count))
    if config.num_kv_blocks is None and config.kv_cache_memory is None:
        own = dataclasses.replace(own, num_kv_blocks=max(1, num_blocks // count))
    if snapshot_memory is not None:
        own = replaced(own, {SNAPSHOT_MEMORY: snapshot_memory // count})
    return own
