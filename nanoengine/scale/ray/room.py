"""Room: CPUs and GPUs of a replica, all of one node, since the ranks of a replica share memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from nanoengine.core.config import EngineConfig
from nanoengine.scale.ray.options import RayOptions
from nanoengine.scale.replicas.options import num_ranks_of, num_replicas_of
from nanoengine.scale.worker.elsewhere import NOT_THERE, replaced


class Room(NamedTuple):
    """In the units of Ray."""

    num_cpus: int
    num_gpus: int


def room_of_each(config: EngineConfig, nodes: Iterable[Mapping[str, float]]) -> Room:
    """The room of each replica.

    Args:
        config: of the engine with all replicas.
        nodes: resources of each node of the cluster, by Ray's names.
    """
    own, num_ranks, nodes = config.of(RayOptions), num_ranks_of(config), list(nodes)
    num_gpus = own.ray_gpus
    if num_gpus is None:
        has_gpus = config.device.startswith("cuda") or any(node.get("GPU", 0) >= 1 for node in nodes)
        num_gpus = num_ranks if has_gpus and config.device != "cpu" else 0
    num_cpus = own.ray_cpus
    if num_cpus is None and num_gpus:
        num_cpus = num_gpus
    if num_cpus is None:
        num_cpus = config.num_threads or _share(num_replicas_of(config), [node.get("CPU", 0) for node in nodes])
    return Room(num_cpus, num_gpus)


def _share(count: int, cpus: Iterable[float]) -> int:
    """CPUs of each of `count` replicas, which are spread over nodes with so many CPUs."""
    sizes = [int(size) for size in cpus if size >= 1]
    return max(1, min(sizes) // math.ceil(count / len(sizes))) if sizes else 1


def config_of_each(config: EngineConfig, room: Room) -> EngineConfig:
    """The config of each replica, which has its room for itself."""
    own = replaced(config, NOT_THERE | {"replicas": 0})
    threads = config.num_threads if room.num_gpus else config.num_threads or max(1, room.num_cpus)
    return dataclasses.replace(own, num_threads=threads, options={**own.options, RayOptions: RayOptions()})
