"""Resources of a replica: CPUs and GPUs, all of one node, since the ranks of a replica share memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from nanoengine.core.config import EngineConfig
from nanoengine.scale.ray.options import RayOptions
from nanoengine.scale.replicas.options import num_ranks_of, num_replicas_of
from nanoengine.scale.worker.remote_model_options import FRONT_ONLY, replaced


class Resources(NamedTuple):
    """CPUs and GPUs, under Ray's names."""

    num_cpus: int
    num_gpus: int


def resources_of_each(config: EngineConfig, nodes: Iterable[Mapping[str, float]]) -> Resources:
    """Resources of each replica.

    Args:
        config: of the engine with all replicas.
        nodes: resources of each node of the cluster, by Ray's names.
    """
    options, num_ranks, nodes = config.of(RayOptions), num_ranks_of(config), list(nodes)
    num_gpus = options.ray_gpus
    if num_gpus is None:
        has_gpus = config.device.startswith("cuda") or any(node.get("GPU", 0) >= 1 for node in nodes)
        num_gpus = num_ranks if has_gpus and config.device != "cpu" else 0
    num_cpus = options.ray_cpus
    if num_cpus is None and num_gpus:
        num_cpus = num_gpus
    if num_cpus is None:
        num_cpus = config.num_threads or _cpus_of_each(num_replicas_of(config), [node.get("CPU", 0) for node in nodes])
    return Resources(num_cpus, num_gpus)


def _cpus_of_each(count: int, cpus: Iterable[float]) -> int:
    """CPUs of each of `count` replicas on nodes with these CPUs; at least 1."""
    sizes = [int(size) for size in cpus if size >= 1]
    return max(1, min(sizes) // math.ceil(count / len(sizes))) if sizes else 1


def config_of_each(config: EngineConfig, resources: Resources) -> EngineConfig:
    """The config of each replica, which has its resources for itself."""
    each = replaced(config, FRONT_ONLY | {"replicas": 0})
    threads = config.num_threads if resources.num_gpus else config.num_threads or max(1, resources.num_cpus)
    return dataclasses.replace(each, num_threads=threads, options={**each.options, RayOptions: RayOptions()})
