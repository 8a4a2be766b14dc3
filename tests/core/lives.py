"""Drawn lives of an engine: requests come, are scheduled in any way, and some fail, are aborted, or meet Ctrl-C.

The theorem of the policy: what a request gets does not depend on how it is scheduled. A capability plugs in what it adds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nanoengine.core.config import POLICIES
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.messages import StepPlan
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.sequence import Request

from .toys import VOCAB, ToyModel, check, check_idle, make_engine, run


def draw_params(rng: random.Random, number: int) -> CoreSamplingParams:
    n, max_tokens = rng.choice([1, 1, 1, 3]), rng.randint(1, 20)
    return CoreSamplingParams(n=n, seed=number, max_tokens=max_tokens, ignore_eos=bool(number % 2))


def draw_requests(
    engine: LLMEngine, seed: int, draw: Callable[[random.Random, int], CoreSamplingParams] = draw_params
) -> list[Request]:
    """Prompts that share beginnings; seeds, ends and completions of all kinds."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(20)]
    requests = []
    for number in range(14):
        prompt = shared[: rng.choice([0, 0, 8, 13, 20])] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        params, priority = draw(rng, number), rng.choice([0, 0, 0, -1, 1])
        requests.append(engine.make_request(prompt, params, priority=priority))
    return requests


def answers(requests: list[Request]) -> list[Any]:
    """Of each completion: its tokens, why it ended, and its text."""
    outputs = [output for request in requests for output in request.output().outputs]
    return [(output.token_ids, output.finish_reason, output.text) for output in outputs]


def draw_way(rng: random.Random) -> dict[str, Any]:
    """Options of `make_engine`."""
    return {
        "policy": rng.choice(POLICIES),
        "max_num_batched_tokens": rng.choice([3, 7, 64, 8192]),
        "num_blocks": rng.choice([15, 16, 25, 400]),
        "depth": rng.choice([1, 2, 3]),
        "enable_prefix_caching": rng.random() < 0.6,
        "max_chunk": rng.choice([None, 5]),
        "max_num_seqs": rng.choice([2, 3, 100]),
    }


HURTS = ("", "fail", "abort", "interrupt", "", "fail", "abort")


class Plug:
    """What a capability adds to lives; here, what the core has alone.

    Attributes:
        rng: what it draws from.
        plain: the requests of an engine that has room for all.
        truth: the tokens of each sequence, by `seq_id`, as they must be.
        seen: counts of rare paths.
        rare: names of those that the lives together must have met.
        rounds: how often each engine gets the same requests.
    """

    rare: tuple[str, ...] = ("preemptions", "cached", "failed", "aborted", "interrupted")
    rounds = 1

    def __init__(self, seed: int):
        self.seed, self.rng, self.seen = seed, random.Random(seed), Counter[str]()
        self.plain: list[Request] = []
        self.truth: dict[int, list[int]] = {}

    def plain_engine(self) -> LLMEngine:
        return make_engine()

    def engine(self, way: dict[str, Any], failing: list[int]) -> LLMEngine:
        return make_engine(model=ToyModel(4, failing), parts=self.parts(), **way)

    def parts(self) -> list[Any]:
        return []

    def requests(self, engine: LLMEngine) -> list[Request]:
        return draw_requests(engine, self.seed)

    def answers(self, requests: list[Request]) -> list[Any]:
        return answers(requests)

    def after_step(self, engine: LLMEngine) -> None:
        check(engine.scheduler)

    def after_round(self, engine: LLMEngine, requests: list[Request]) -> None:
        """All requests have ended."""

    def after_life(self, engine: LLMEngine) -> None:
        """Count what has happened, and see what is left."""


def check_lives(plug: Plug, num_lives: int) -> None:
    """Each completion is what it is in an engine that has room for all, or a beginning of that if it was cut off."""
    engine = plug.plain_engine()
    plug.plain = plug.requests(engine)
    run(engine, plug.plain)
    expected, errors = plug.answers(plug.plain), {str(request.error) for request in plug.plain}
    sequences = [seq for request in plug.plain for seq in request.sequences]
    for number in range(plug.rounds):
        plug.truth |= {seq.seq_id + number * len(sequences): seq.token_ids for seq in sequences}
    rng, seen = plug.rng, plug.seen
    for number in range(num_lives):
        way, hurt = draw_way(rng), HURTS[number % len(HURTS)]
        engine = plug.engine(way, [rng.randint(2, 12)] if hurt == "fail" else [])
        for _ in range(plug.rounds):
            requests = plug.requests(engine)
            live(engine, requests, plug, hurt)
            for want, got in zip(expected, plug.answers(requests), strict=True):
                if got != want:
                    assert {"error": "fail", "abort": "abort"}.get(got[1]) == hurt, (way, hurt, want, got)
                    assert got[0] == want[0][: len(got[0])], way
                    seen["failed" if hurt == "fail" else "aborted"] += 1
            assert {str(request.error) for request in requests} <= errors | {"None", "injected"}
            seen["cached"] += sum(request.output().num_cached_tokens for request in requests)
            plug.after_round(engine, requests)
        seen["preemptions"] += engine.scheduler.num_preemptions
        plug.after_life(engine)
    assert all(seen[name] for name in plug.rare), f"the rare paths were met: {seen}"


def live(engine: LLMEngine, requests: list[Request], plug: Plug, hurt: str) -> None:
    """Requests come at once or one by one, and run to their end; sometimes one is aborted, or Ctrl-C comes."""
    rng, model = plug.rng, engine.executor
    slowness = rng.choice([0, 0, 0, 8])
    arrivals = sorted(rng.randint(0, slowness) for _ in requests)
    num_steps, num_submitted, when, launch = 0, 0, rng.randint(1, 12), model.launch

    def interrupted(plan: StepPlan) -> Any:
        plug.seen["interrupted"] += 1
        done = launch(plan) if rng.random() < 0.5 else None
        if done is not None and rng.random() < 0.5:  # it comes while the result is waited for
            return interrupt
        raise KeyboardInterrupt

    while num_submitted < len(requests) or engine.has_unfinished:
        while num_submitted < len(requests) and arrivals[num_submitted] <= num_steps:
            engine.submit(requests[num_submitted])
            num_submitted += 1
        if num_steps == when and hurt == "abort":
            engine.abort(rng.choice(requests).request_id)
        model.launch = interrupted if num_steps == when and hurt == "interrupt" else launch
        with suppress(KeyboardInterrupt):
            engine.step()
        plug.after_step(engine)
        num_steps += 1
        assert num_steps < 5000, "the engine does not come to an end"
    model.launch = launch
    check_idle(engine)


def interrupt() -> Any:
    raise KeyboardInterrupt
