"""Options of replicas on a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.errors import InvalidConfig
from nanoengine.core.options import check, option

MOST_UNITS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Options of replicas on a Ray cluster; all are keyword arguments of `LLM`.

    Args:
        ray: the replicas run as actors of a Ray cluster, each on a node with room for it. `replicas` is their number.
        ray_address: of the cluster, as `ray.init` takes it: "auto", or "HOST:6379". None: that in the environment variable
            RAY_ADDRESS, or a cluster that runs on this machine, or a new one that ends with this process.
        ray_cpus: CPUs of a node that a replica takes. None: its num_threads, or an equal part of the smallest node; with GPUs,
            one for each.
        ray_gpus: GPUs that a replica takes, all of one node. None: tensor_parallel_size, where the cluster has GPUs and the
            device is not "cpu".

    Raises:
        InvalidConfig: a value that cannot work.
    """

    ray: bool = False
    ray_address: str | None = None
    ray_cpus: int | None = option(None, 0, MOST_UNITS)
    ray_gpus: int | None = option(None, 0, MOST_UNITS)

    def __post_init__(self) -> None:
        check(self)
        if self.ray_address == "":
            raise InvalidConfig('ray_address is \'\': it must be "auto", "HOST:PORT" or None')
