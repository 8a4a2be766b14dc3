"""The theorem of the policy: what a request gets does not depend on how it is scheduled."""

from __future__ import annotations

import random
from typing import Any

import pytest

from nanoengine.core.config import POLICIES
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.sequence import Request

from .toys import VOCAB, ToyModel, make_engine, run

NUM_WAYS = 40


def draw_requests(engine: LLMEngine, seed: int) -> list[Request]:
    """Prompts that share beginnings; seeds, ends and completions of all kinds."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(20)]
    requests = []
    for number in range(14):
        prompt = shared[: rng.choice([0, 0, 8, 13, 20])] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        params = CoreSamplingParams(
            n=rng.choice([1, 1, 1, 3]), seed=number, max_tokens=rng.randint(1, 20), ignore_eos=bool(number % 2)
        )
        priority = rng.choice([0, 0, 0, -1, 1])
        requests.append(engine.make_request(prompt, params, priority=priority))
    return requests


def answers(requests: list[Request]) -> list[tuple[list[int], str | None, str]]:
    outputs = [output for request in requests for output in request.output().outputs]
    return [(output.token_ids, output.finish_reason, output.text) for output in outputs]


def draw_way(rng: random.Random) -> dict[str, Any]:
    return {
        "policy": rng.choice(POLICIES),
        "max_num_batched_tokens": rng.choice([3, 7, 64, 8192]),
        "num_blocks": rng.choice([15, 16, 25, 400]),
        "depth": rng.choice([1, 2, 3]),
        "enable_prefix_caching": rng.random() < 0.6,
        "max_chunk": rng.choice([None, 5]),
        "max_num_seqs": rng.choice([2, 3, 100]),
    }


@pytest.mark.parametrize("seed", range(6))
def test_what_a_request_gets_does_not_depend_on_the_way_in_which_it_is_scheduled(seed: int) -> None:
    engine = make_engine()
    requests = draw_requests(engine, seed)
    run(engine, requests)
    expected = answers(requests)
    rng, seen = random.Random(seed), dict.fromkeys(("preemptions", "cached", "failed", "aborted"), 0)
    for _ in range(NUM_WAYS):
        way, fails, aborts = draw_way(rng), rng.random() < 0.3, rng.random() < 0.2
        model = ToyModel(4, failing=[rng.randint(2, 12)] if fails else [])
        engine = make_engine(model=model, **way)
        requests = draw_requests(engine, seed)
        if aborts:
            victim = rng.choice(requests)
            for request in requests:
                engine.submit(request)
            for _ in range(rng.randint(1, 8)):
                engine.step()
            seen["aborted"] += engine.abort(victim.request_id)
            run(engine, [])
        else:
            run(engine, requests)
        for want, got in zip(expected, answers(requests), strict=True):
            if got[1] in ("error", "abort"):
                assert fails or aborts, way
                assert got[0] == want[0][: len(got[0])], way
                seen["failed"] += got[1] == "error"
            else:
                assert got == want, way
        seen["preemptions"] += engine.scheduler.num_preemptions
        seen["cached"] += sum(request.output().num_cached_tokens for request in requests)
    assert all(seen.values()), f"the rare paths were met: {seen}"
