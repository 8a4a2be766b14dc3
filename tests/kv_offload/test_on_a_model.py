"""The bundled model in a tiny pool full of NaN, with host memory and files behind it: the tokens are those of a large pool."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from nanoengine.core.capability import Capability
from nanoengine.core.config import EngineConfig
from nanoengine.core.sampling_params import SamplingParams
from nanoengine.core.startup import Startup
from nanoengine.kv_offload.capability import KVOffload
from nanoengine.kv_offload.offload import Offload
from nanoengine.kv_offload.options import KVOffloadOptions

DEMO = str(Path(__file__).parents[2] / "nanoengine" / "demo")
TINY: dict[str, Any] = {"num_kv_blocks": 15}


def answers(options: dict[str, Any], *, num_rounds: int = 1, **config: Any) -> tuple[list[list[list[int]]], Any]:
    """The tokens of some requests in each of some rounds, and what has moved."""
    parts: list[Capability] = [KVOffload()]
    values = {"dtype": "float32", "max_model_len": 200} | config | options
    startup = Startup(EngineConfig.from_options(DEMO, values, (KVOffloadOptions,)), parts)
    engine = startup.build()
    for place in startup.runner.kv_cache.places:
        for tensor in place:
            tensor.fill_(float("nan"))
    rng, found = random.Random(0), []
    prompts = [[rng.randrange(1, 4096) for _ in range(137 - 13 * number)] for number in range(6)]
    for _ in range(num_rounds):
        requests = []
        for number, prompt in enumerate(prompts):
            sampled = {"temperature": 0.8 * (number % 2), "seed": number, "n": 1 + number // 5}
            params = SamplingParams(max_tokens=15 + number, ignore_eos=True, **sampled)
            requests.append(engine.make_request(prompt, params))
            engine.submit(requests[-1])
        while engine.has_unfinished:
            engine.step()
        assert not any(request.error for request in requests)
        found.append([seq.output_token_ids for request in requests for seq in request.sequences])
    engine.close()
    [capability] = parts
    assert isinstance(capability, KVOffload)
    return found, capability.offload


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    [tokens], offload = answers({})
    assert offload is None
    return tokens


@pytest.mark.parametrize(
    ("memory", "config"),
    [
        (8, {}),
        (300, {"max_num_batched_tokens": 40}),
        (40, {"max_num_batched_tokens": 40, "async_scheduling": True, "scheduling_policy": "mixed"}),
    ],
)
def test_swapped_blocks_come_back_as_they_were(right: list[list[int]], memory: int, config: dict[str, Any]) -> None:
    block_bytes = 2 * 16 * 4 * 128 * 2 * 2
    options = {"preemption_mode": "swap", "kv_host_memory": memory * block_bytes}
    found, offload = answers(options, num_rounds=2, **TINY, **config)
    assert found == [right, right]
    assert isinstance(offload, Offload)
    assert offload.stats.num_loaded_blocks > 0


def test_a_later_engine_finds_what_an_earlier_one_computed(right: list[list[int]], tmp_path: Path) -> None:
    options = {"kv_disk_path": str(tmp_path)}
    [found], offload = answers(options)
    assert (found, offload.stats.num_loaded_files) == (right, 0)
    [found], offload = answers(options)
    assert (found, offload.stats.num_bad_files) == (right, 0)
    assert offload.stats.num_loaded_files == sum((137 - 13 * number - 1) // 16 for number in range(6))
    found, offload = answers(options, num_rounds=2, **TINY, kv_host_memory=1 << 20, async_scheduling=True)
    assert found == [right, right]
    assert offload.stats.num_loaded_files > 0
    assert len(list(tmp_path.iterdir())) == 1
    [found], offload = answers(options | {"block_size": 8})
    assert (found, offload.stats.num_loaded_files) == (right, 0), "blocks of another layout have files of their own"
