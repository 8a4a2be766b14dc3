"""Tensor parallelism as a capability. The process with the requests starts a group of ranks; each rank computes a part of every
weight, and of the heads and their K/V.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from nanoengine.core.capability import Capability
from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.messages import StepResult
from nanoengine.core.model_runner import ModelRunner, RunnerPart
from nanoengine.core.qwen3 import DenseDecoder
from nanoengine.core.startup import Startup
from nanoengine.kernels.native.attention import NativeAttention
from nanoengine.kernels.operations import Kernels
from nanoengine.kernels.triton.tuning import Tuning
from nanoengine.models.decoder import Decoder, DecoderLayer, SelfAttention
from nanoengine.models.layers.experts import Experts
from nanoengine.models.layers.mixer import Mixer
from nanoengine.models.layers.mlp import MLP
from nanoengine.models.layers.parts import NoPart, SquaredMLP
from nanoengine.models.model_config import ModelConfig
from nanoengine.scale.parallel import context
from nanoengine.scale.parallel.communicator import Communicator, Distributed, SharedMemory
from nanoengine.scale.parallel.context import ContextAttention, ContextRunner, check_context
from nanoengine.scale.parallel.group import GroupFactory, RankGroup
from nanoengine.scale.parallel.kernels import GroupKernels
from nanoengine.scale.parallel.options import ParallelOptions
from nanoengine.scale.parallel.partition import Partition
from nanoengine.scale.parallel.states import units_of_ranks
from nanoengine.scale.worker.member import Member
from nanoengine.scale.worker.remote_model_options import FRONT_ONLY, check_shared, replaced
from nanoengine.scale.worker.remote_runner import RemoteRunner

PARTITIONED = (SelfAttention, Mixer, MLP, SquaredMLP, Experts, NoPart)
"""Parts of layers whose weights `GroupFactory` can partition."""

REFUSED = ("preemption_mode", "kv_host_memory", "kv_disk_path", "draft_model")
"""Options of capabilities whose policy reads tensors of the runner, which are in other processes here."""


class Parallel(Capability):
    """Tensor parallelism at start-up. The process with the requests has no model, and its runner is a `RemoteRunner`, which
    starts the ranks. In a rank, `startup.factory` makes the model.
    """

    options = ParallelOptions
    group: RankGroup | None = None

    def describe(self, startup: Startup) -> None:
        config = startup.config
        self.options_used = config.of(ParallelOptions)
        startup.num_ranks = self.options_used.tensor_parallel_size
        if startup.num_ranks > 1 and Member not in config.options:
            refuse(config)
            startup.runner_elsewhere = True

    def model(self, startup: Startup) -> DenseDecoder | None:
        member = startup.config.options.get(Member)
        if startup.num_ranks == 1:
            return None
        if member is None:
            check_pool(startup)
            check_shared(startup, startup.num_ranks)
            return cast(DenseDecoder, self)  # a placeholder: this process computes nothing
        config = cast(ModelConfig, startup.model_config)
        communicator = self._communicator(startup, member, config)
        _launch_in_order(startup.kernels, startup.backend)
        self.group = group = RankGroup(config, communicator, splits_context=self.options_used.splits_context)
        if group.splits_context:
            assert isinstance(startup.backend, NativeAttention)
            assert isinstance(communicator, SharedMemory)
            startup.backend = ContextAttention(startup.backend, communicator)
        else:
            startup.num_kv_heads = len(group.partition.kv_heads[group.rank])

        def factory(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> GroupFactory:
            return GroupFactory(GroupKernels(kernels, group), dtype, device, group=group)

        startup.factory, startup.rows_of_rank = factory, group.rows_of_rank
        return None

    def _communicator(self, startup: Startup, member: Member, config: ModelConfig) -> Communicator:
        device = startup.device.torch_device
        if device.type == "cuda":
            return Distributed(member, "nccl", device)
        num_bytes = row_bytes(config)
        if self.options_used.splits_context:
            max_len = startup.config.max_model_len or config.max_position_embeddings
            num_bytes = max(num_bytes, context.row_bytes(config, max_len))
        return SharedMemory.of_member(member, num_bytes)

    def before_pool(self, startup: Startup) -> None:
        config, size = cast(ModelConfig, startup.model_config), startup.num_ranks
        if size == 1:
            return
        if self.group is not None:
            check_layers(cast(Decoder, startup.model).layers, size)
        partition = Partition(size, config.num_heads, config.num_kv_heads, config.head_dim)
        if config.states is not None:
            units_of_ranks(config.states, size)  # raises InvalidConfig for a rank without heads
        if self.options_used.splits_context:
            check_context(startup, size)
        elif self.group is None:
            # The pool has the bytes of all ranks. A K/V head that several ranks have counts once for each.
            copies = sum(map(len, partition.kv_heads)) - config.num_kv_heads
            startup.block_bytes += copies * startup.bytes_of_block(startup.groups) // config.num_kv_heads
        else:
            rank = self.group.rank
            for part in (part for layer in cast(Decoder, startup.model).layers for part in layer.mixing):
                if isinstance(part, SelfAttention):
                    part.attention.num_kv_heads = len(partition.kv_heads[rank])
                    part.gate_size = part.gate_size and len(partition.heads[rank]) * config.head_dim
                    if (sinks := part.attention.sinks) is not None:
                        part.attention.sinks = sinks[partition.heads[rank].start : partition.heads[rank].stop]

    def new_runner(self, startup: Startup) -> ModelRunner | None:
        if startup.num_ranks == 1:
            return None
        if self.group is None:
            return _remote_runner(startup)
        return startup.new_runner(partial(ContextRunner, self.group)) if self.group.splits_context else None

    def runner(self, startup: Startup) -> None:
        if self.group is not None:
            startup.runner.parts.append(EndOfStep(self.group.communicator))

    def describe_itself(self, startup: Startup) -> str | None:
        return f"{startup.num_ranks} ranks" if startup.num_ranks > 1 else None


def _remote_runner(startup: Startup) -> ModelRunner:
    """Ranks with pools of `startup.num_blocks`, which also bound the length of a sequence there."""
    config, size = startup.config, startup.num_ranks
    same = replace(
        replaced(config, FRONT_ONLY),
        device=startup.device.torch_device.type,
        num_threads=max(1, startup.device.num_threads // size),  # of this process, which computes nothing
        num_kv_blocks=startup.num_blocks,
        kv_cache_memory=None,
        block_size=startup.block_size,
    )
    limit = config.of(ParallelOptions).worker_step_seconds
    return cast(ModelRunner, RemoteRunner(same, size, limit, use_tqdm=startup.use_tqdm))


def refuse(config: EngineConfig) -> None:
    """Raise InvalidConfig for an option in REFUSED with another value than its default."""
    for options in config.options.values():
        for name in REFUSED:
            if hasattr(options, name) and getattr(options, name) not in (None, getattr(type(options)(), name)):
                raise InvalidConfig(f"{name} is not computed by ranks: leave it out, or tensor_parallel_size")


def check_pool(startup: Startup) -> None:
    """Raise InvalidConfig for a pool on GPUs without a size: only the ranks could measure it."""
    config = startup.config
    if startup.device.is_cuda and config.num_kv_blocks is None and config.kv_cache_memory is None:
        raise InvalidConfig(
            "tensor_parallel_size on GPUs needs num_kv_blocks or kv_cache_memory: only ranks could measure it"
        )


def _launch_in_order(*users: object) -> None:
    """Turn off dependent launches of Triton kernels: gathers run between kernels, and biases are made at their first use."""
    for user in users:
        if isinstance(tuning := getattr(user, "tuning", None), Tuning):
            user.tuning = replace(tuning, dependent_launch=0)  # type: ignore[attr-defined]


class EndOfStep(RunnerPart):
    """Checks at the end of a step that all ranks took part in it."""

    def __init__(self, communicator: Communicator):
        self._communicator = communicator

    def end(self, result: StepResult) -> None:
        self._communicator.check()


def check_layers(layers: Iterable[DecoderLayer], ranks: int) -> None:
    """Raise InvalidConfig for a layer with a part that ranks cannot partition."""
    for layer in layers:
        for part in (*layer.mixing, layer.mlp):
            if not isinstance(part, PARTITIONED):
                raise InvalidConfig(
                    f"tensor_parallel_size is {ranks}, but a layer of the model has a {type(part).__name__}, which ranks do not "
                    "share: use 1"
                )


def row_bytes(config: ModelConfig) -> int:
    """Upper bound of the bytes of a gathered row."""
    experts = 0 if config.experts is None else config.experts.intermediate_size
    heads, states = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim, config.states
    of_states = 0 if states is None else max(states.channels, states.num_heads * states.width)
    sizes = config.vocab_size, config.hidden_size, config.intermediate_size, experts, heads, of_states
    return 4 * max(sizes)
