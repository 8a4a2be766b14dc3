"""What each replica is started with."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest
import torch

from nanoengine.builder import build_engine, read_config
from nanoengine.core.config import EngineConfig
from nanoengine.errors import InvalidConfig
from nanoengine.features.kv_groups.options import KVGroupsOptions
from nanoengine.features.lora.options import LoRAOptions
from nanoengine.scale.replicas import capability
from nanoengine.scale.replicas.capability import config_of_each, gpus_of_each
from nanoengine.scale.replicas.carrier import gpus_of
from nanoengine.scale.replicas.options import ReplicaOptions, num_replicas_of


def test_replicas_share_the_cores_and_the_memory_of_a_machine() -> None:
    config = read_config("demo", {"replicas": 2, "max_num_seqs": 9})
    each = config_of_each(config, 101, has_gpus=False)
    assert each.num_kv_blocks == 50
    assert each.num_threads == max(1, len(os.sched_getaffinity(0)) // 2)
    assert each.max_num_seqs == 9
    assert each.of(ReplicaOptions).replicas == 0
    given = {"replicas": 2, "num_kv_blocks": 30, "num_threads": 3}
    each = config_of_each(read_config("demo", given), 101, has_gpus=False)
    assert (each.num_kv_blocks, each.num_threads) == (30, 3)
    memory = config_of_each(read_config("demo", {"replicas": 2, "kv_cache_memory": "1MiB"}), 101, has_gpus=False)
    assert (memory.num_kv_blocks, memory.kv_cache_memory) == (None, 1 << 20)


def test_blocks_are_as_large_as_where_they_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may compute on another device than this process, and like other blocks."""

    class Started(Exception): ...

    def start(config: EngineConfig, *_: object, **__: object) -> NoReturn:
        raise Started(config.block_size)

    monkeypatch.setattr(capability, "LocalCarrier", start)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    on_gpus: list[tuple[dict[str, object], int]] = [
        ({"attention_backend": "flash_attn"}, 256),
        ({"attention_backend": "triton", "kernels": "triton", "kv_cache_dtype": "int8"}, 16),
        ({}, 16),
        ({"attention_backend": "flash_attn", "block_size": 512}, 512),
    ]
    on_cpu: list[tuple[dict[str, object], int]] = [({}, 16), ({"block_size": 256}, 256)]
    for device, cases in (("cuda", on_gpus), ("cpu", on_cpu)):
        for given, size in cases:
            with pytest.raises(Started, match=f"^{size}$"):
                build_engine(read_config("demo", {"replicas": 1, "device": device, **given}), use_tqdm=False)


def test_replicas_share_the_memory_of_snapshots() -> None:
    each = config_of_each(read_config("demo", {"replicas": 4}), 101, 1000, has_gpus=False)
    assert each.of(KVGroupsOptions).snapshot_memory == 250
    given = read_config("demo", {"replicas": 3, "snapshot_memory": 77})
    assert config_of_each(given, 101, has_gpus=False).of(KVGroupsOptions).snapshot_memory == 77


def test_adapters_are_sent_to_each_and_read_by_none() -> None:
    given = read_config("demo", {"replicas": 2, "enable_lora": True, "lora_modules": ["a=b"]})
    own = config_of_each(given, 101, has_gpus=False).of(LoRAOptions)
    assert (own.enable_lora, own.lora_modules) == (True, None)


def test_each_has_a_gpu_of_its_own() -> None:
    config = read_config("demo", {"replicas": 2, "device": "cuda:1"})
    each = config_of_each(config, 101, has_gpus=True)
    assert (each.device, each.num_kv_blocks, each.num_threads) == ("cuda", None, None)
    assert (gpus_of_each(config, 2), gpus_of_each(config, 0)) == (1, 0)
    with pytest.raises(InvalidConfig, match="replicas is 2, and torch sees 1 GPUs"):
        gpus_of_each(config, 1)
    assert gpus_of(1, 1, {}) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert gpus_of(1, 1, {"CUDA_VISIBLE_DEVICES": "4,5"}) == {"CUDA_VISIBLE_DEVICES": "5"}


def test_ranks_are_in_a_replica_with_a_gpu_for_each() -> None:
    config = read_config("demo", {"tensor_parallel_size": 2})
    assert num_replicas_of(config) == 1
    each = config_of_each(config, 101, has_gpus=False)
    assert num_replicas_of(each) == 0
    assert each.num_kv_blocks is None, (
        "ranks that have copies of K/V heads make blocks larger, which only the replica knows"
    )
    assert num_replicas_of(read_config("demo", {"tensor_parallel_size": 2, "replicas": 0})) == 0
    assert gpus_of_each(config, 2) == 2
    with pytest.raises(InvalidConfig, match="replicas is 1, and torch sees 1 GPUs, of which each takes 2"):
        gpus_of_each(config, 1)
    assert gpus_of(1, 2, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == {"CUDA_VISIBLE_DEVICES": "6,7"}


@pytest.mark.parametrize(
    "options",
    [
        {"replicas": 1.5},
        {"replicas": True},
        {"replicas": 10**6},
        {"replica_silence_seconds": 0},
        {"replica_step_seconds": "x"},
        {"replica_start_seconds": 0},
        {"replica_wait_seconds": float("nan")},
    ],
)
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(options))):
        read_config("demo", options)
