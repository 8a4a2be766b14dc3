"""What of a node a replica takes; and what is refused before a cluster is asked for anything."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from nanoengine import LLM
from nanoengine.builder import read_config
from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidConfig
from nanoengine.errors import MissingPackage
from nanoengine.scale.ray import deployment
from nanoengine.scale.ray.options import RayOptions
from nanoengine.scale.ray.resources import Resources, config_of_each, resources_of_each
from nanoengine.scale.replicas.options import ReplicaOptions

CPUS = [{"CPU": 16.0}, {"CPU": 16.0}]
GPUS = [{"CPU": 64.0, "GPU": 8.0}] * 2


def config(**options: Any) -> EngineConfig:
    return read_config("demo", {"replicas": 2, "ray": True, **options})


@pytest.mark.parametrize(
    ("options", "nodes", "resources"),
    [
        ({}, CPUS, Resources(16, 0)),
        ({"replicas": 3}, CPUS, Resources(8, 0)),
        ({"replicas": 7}, CPUS, Resources(4, 0)),
        ({"replicas": 100}, CPUS, Resources(1, 0)),
        ({}, [{"CPU": 0.0}, {"CPU": 6.0}, {"CPU": 4.0}, {"memory": 1.0}], Resources(4, 0)),
        ({}, [], Resources(1, 0)),
        ({"num_threads": 5}, CPUS, Resources(5, 0)),
        ({"ray_cpus": 3, "num_threads": 5}, CPUS, Resources(3, 0)),
        ({"ray_cpus": 0}, CPUS, Resources(0, 0)),
        ({}, GPUS, Resources(1, 1)),
        ({"device": "cpu"}, GPUS, Resources(64, 0)),
        ({"device": "cuda"}, CPUS, Resources(1, 1)),
        ({"ray_gpus": 4}, GPUS, Resources(4, 4)),
        ({"ray_gpus": 0}, GPUS, Resources(64, 0)),
        ({"ray_gpus": 4, "ray_cpus": 9}, GPUS, Resources(9, 4)),
    ],
)
def test_a_replica_gets_its_share(options: dict[str, Any], nodes: list[dict[str, float]], resources: Resources) -> None:
    assert resources_of_each(config(**options), nodes) == resources


def test_a_replica_takes_a_gpu_for_each_rank() -> None:
    assert resources_of_each(config(tensor_parallel_size=4), GPUS) == Resources(4, 4)


def test_each_is_a_whole_engine_that_uses_its_room() -> None:
    own = config(ray_address="auto", max_num_seqs=7)
    each = config_of_each(own, Resources(6, 0))
    assert each.num_threads == 6
    assert each.max_num_seqs == 7
    assert each.of(ReplicaOptions) == ReplicaOptions(replicas=0)
    assert each.of(RayOptions) == RayOptions()
    assert config_of_each(own, Resources(2, 2)).num_threads is None, "a GPU's host threads are torch's choice"
    assert config_of_each(config(num_threads=3), Resources(8, 0)).num_threads == 3
    assert config_of_each(own, Resources(0, 0)).num_threads == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ray": 1}, "ray is 1: it must be True or False"),
        ({"ray_address": ""}, "ray_address is ''"),
        ({"ray_cpus": -1}, "ray_cpus is -1"),
        ({"ray_gpus": 1.5}, "ray_gpus is 1.5"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        RayOptions(**options)


def test_ray_without_replicas_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="replicas is 0: say how many"):
        LLM("demo", ray=True, use_tqdm=False)


def test_without_the_package_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "ray":
            raise ImportError("No module named 'ray'")
        return real(name, *rest, **options)

    monkeypatch.setattr("importlib.import_module", lambda name: refuse(name))
    monkeypatch.setattr(builtins, "__import__", refuse)
    for call in (deployment, lambda: LLM("demo", ray=True, replicas=1, use_tqdm=False)):
        with pytest.raises(MissingPackage, match=r"pip install 'nanoengine\[ray\]'"):
            call()
