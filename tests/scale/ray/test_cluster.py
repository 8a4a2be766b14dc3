"""Replicas on a real cluster: nodes and actors are killed, and requests do not notice.

Skipped where Ray is not installed. It takes about a minute, most of it for Ray to start.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from nanoengine import LLM, AsyncLLMEngine, SamplingParams
from nanoengine.builder import build_engine, is_installed, read_config
from nanoengine.errors import EngineClosed
from nanoengine.scale.ray import carrier
from nanoengine.scale.ray.carrier import RayCarrier
from nanoengine.scale.ray.resources import Resources
from nanoengine.scale.replicas.engine import ReplicatedEngine

from .cluster import OPTIONS, another_node, cluster, needs_ray, pids_of, wait_for

needs_ray()

COUNT = 200
PROMPTS = [f"def number_{count % 50}(values, {'x' * (count % 7)}" for count in range(COUNT)]
PARAMS = [
    SamplingParams(
        n=1 + (count % 10 == 0),
        temperature=float(count % 3 > 0),
        seed=count,
        max_tokens=20 + count % 30,
        ignore_eos=bool(count % 2),
        logprobs=1 if count % 4 == 0 else None,
        presence_penalty=0.5 * (count % 5 == 0),
        stop=("return",) if count % 6 == 0 else (),
    )
    for count in range(COUNT)
]


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[Any]:
    with cluster() as own:
        yield own


@pytest.fixture(scope="module")
def offline() -> list[list[Any]]:
    """What one engine answers, alone: (tokens, text, log probabilities, reason) of each completion of each request."""
    with LLM("demo", use_tqdm=False, **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [
        [(own.token_ids, own.text, own.logprobs, own.finish_reason) for own in output.outputs] for output in outputs
    ]


async def read(engine: AsyncLLMEngine, number: int, got: list[int]) -> list[Any]:
    """What a client gets, piece by piece."""
    params = PARAMS[number]
    found: list[list[Any]] = [[[], "", None if params.logprobs is None else [], None] for _ in range(params.n)]
    async for delta in engine.generate(PROMPTS[number], params):
        own = found[delta.index]
        assert own[3] is None, "nothing comes behind an end"
        own[0] += delta.token_ids
        own[1] += delta.text
        if own[2] is not None and delta.logprobs is not None:
            own[2] += delta.logprobs
        own[3] = delta.finish_reason
        got[0] += len(delta.token_ids)
    return [tuple(own) for own in found]


def test_a_node_is_killed_while_200_requests_run(nodes: Any, offline: list[list[Any]]) -> None:
    config = read_config("demo", {"ray": True, "replicas": 2, **OPTIONS})
    engine = AsyncLLMEngine(lambda: build_engine(config, False).engine)
    own = engine.engine
    assert isinstance(own, ReplicatedEngine)
    num_expected = sum(len(completion[0]) for completions in offline for completion in completions)

    async def all_of_them() -> list[Any]:
        got = [0]
        tasks = [asyncio.create_task(read(engine, number, got)) for number in range(COUNT)]
        while got[0] < num_expected // 5:
            await asyncio.sleep(0.001)
        assert not all(task.done() for task in tasks)
        await asyncio.to_thread(nodes.remove_node, another_node(nodes), allow_graceful=False)
        found = await asyncio.gather(*tasks)
        assert got[0] == num_expected, "no token comes twice"
        return found

    try:
        found = asyncio.run(all_of_them())
        assert found == offline
        assert own.supervisor.num_lost == 1
        assert own.fleet.num_moves > 0
        nodes.add_node(num_cpus=1, object_store_memory=80 << 20, include_dashboard=False)
        wait_for(lambda: own.supervisor.num_ready == 2)  # where there is room again
        assert asyncio.run(read(engine, 0, [0])) == offline[0]
    finally:
        engine.close()
    wait_for(lambda: not pids_of("RayReplica"))


def test_one_that_waits_for_room_is_given_up_when_the_engine_closes(caplog: pytest.LogCaptureFixture) -> None:
    own = RayCarrier(read_config("demo", OPTIONS), Resources(64, 0), 1)
    threading.Timer(3.0, own.close).start()
    with patch.object(carrier, "LOG_SECONDS", 1.0), pytest.raises(EngineClosed, match="replica 3 waited for a node"):
        own.start(3)
    assert "replica 3 waits for a node of the Ray cluster with room for 64 CPUs" in caplog.text
    wait_for(lambda: not pids_of("RayReplica"))


@pytest.mark.skipif(
    not is_installed("parallel"), reason="tensor parallelism (nanoengine/scale/parallel) is not installed"
)
def test_a_replica_of_two_ranks(offline: list[list[Any]]) -> None:
    options = {"ray": True, "replicas": 1, "tensor_parallel_size": 2, "ray_cpus": 1, **OPTIONS}
    with LLM("demo", use_tqdm=False, **options) as llm:
        outputs = llm.generate(PROMPTS[:40], PARAMS[:40], use_tqdm=False)
    found = [[(own.token_ids, own.text, own.logprobs, own.finish_reason) for own in o.outputs] for o in outputs]
    assert found == offline[:40]
    wait_for(lambda: not pids_of("RayReplica"))
