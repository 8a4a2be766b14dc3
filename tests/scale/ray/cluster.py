"""A real cluster on this machine: a head without CPUs, and two nodes of one CPU each. Each node is a set of processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
NODE = {"object_store_memory": 80 << 20, "include_dashboard": False}
PATIENCE = 120.0
OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_model_len": 256, "num_kv_blocks": 400}


def needs_ray(name: str = "ray") -> None:
    """Skip a test, or a module of tests, where Ray or this part of it is not installed."""
    reason = f"{name} is not installed: pip install 'nanoengine[ray]'"
    pytest.importorskip(name, reason=reason)


@contextmanager
def cluster(num_nodes: int = 2) -> Iterator[Any]:
    """Start one, and connect to it; nothing of it is left behind."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = str(ROOT)  # of the processes of its nodes
    own = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **NODE})
    try:
        for _ in range(num_nodes):
            own.add_node(num_cpus=1, **NODE)
        own.wait_for_nodes()
        ray.init(address=own.address, logging_level="WARNING")
        yield own
    finally:
        ray.shutdown()
        own.shutdown()


def another_node(own: Any) -> Any:
    """A node that this process is not connected to, with room for a replica."""
    import ray

    connected = ray._private.worker.global_worker.node._raylet_socket_name  # type: ignore[attr-defined]
    return next(node for node in own.worker_nodes if node._raylet_socket_name != connected)


def pids_of(name: str) -> list[int]:
    """Processes of actors, by the name that Ray gives them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text()
        except OSError:  # it has ended
            continue
        if line.startswith("ray::") and name in line:
            found.append(int(path.parent.name))
    return found


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        time.sleep(0.05)
        assert time.monotonic() < end, "it does not come to that"
