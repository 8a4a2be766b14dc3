"""Routers over replicas: one that knows the caches beside random and least loaded.

python -m benchmarks.router speed                 requests routed per second on one core, with replicas that compute nothing
python -m benchmarks.router simulate [--replicas] hit rates and TTFT of traces on simulated replicas
python -m benchmarks.router real                  the same on two engines of the bundled model on this machine
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from array import array
from collections.abc import Iterable
from typing import Any

import xxhash

from benchmarks.router_simulation import SIZE, TRACES, simulate
from nanoengine.replicas.router import Route, Router

POLICIES = ("random", "least loaded", "router")


def at_random(router: Router, hashes: Iterable[bytes], num_prompt: int, num_new: int) -> Route:  # noqa: ARG001
    """Any replica."""
    replica = random.choice(router._order)[-1]
    router._reserve(replica, num_prompt + num_new)
    return Route(replica, 0, num_prompt, num_new)


def least_loaded(router: Router, hashes: Iterable[bytes], num_prompt: int, num_new: int) -> Route:  # noqa: ARG001
    """The replica with the least to do, whatever is cached."""
    return Router.route(router, (), num_prompt, num_new)


ROUTE_OF: dict[str, Any] = dict(zip(POLICIES, (at_random, least_loaded, Router.route), strict=True))


def speed() -> None:
    """Requests of 1,024 tokens, of which 1,024 beginnings of half that length are shared; each computes what is not cached."""
    num_blocks, shared, rng = 1024 // SIZE, 512 // SIZE, random.Random(0)
    beginnings = [[rng.randbytes(16) for _ in range(shared)] for _ in range(1024)]
    tokens = [array("i", [rng.randrange(50_000) for _ in range(SIZE)]).tobytes() for _ in range(num_blocks)]
    print(f"{'replicas':>8}  {'routed/s':>9}  {'with events':>11}  {'and hashes':>10}")
    for count in (2, 16, 128, 1000):
        rates = [max(_rate(count, beginnings, tokens, *how) for _ in range(3)) for how in ((0, 0), (1, 0), (1, 1))]
        print(f"{count:>8}  {rates[0]:>9,.0f}  {rates[1]:>11,.0f}  {rates[2]:>10,.0f}")


def _rate(count: int, beginnings: list[list[bytes]], tokens: list[bytes], with_events: int, with_hashes: int) -> float:
    router, rng, open_routes = Router(SIZE), random.Random(1), []
    for replica in range(count):
        router.add(replica)
    for place, own in enumerate(beginnings):  # each is cached by four
        for replica in range(place, place + 4):
            router.stored(replica % count, own)
    prompts = [rng.choice(beginnings) + [rng.randbytes(16) for _ in range(32)] for _ in range(6000)]
    start = time.perf_counter()
    for prompt in prompts:
        if with_hashes:
            parent = b""
            for block in tokens:
                parent = xxhash.xxh3_128_digest(parent + block, 7)
        route = router.begun(router.route(prompt, 1024, 128))
        open_routes.append(route)
        if with_events:
            router.stored(route.replica, prompt[route.num_cached_tokens // SIZE :])
            router.removed(route.replica, prompt[32:])
        if len(open_routes) > 2 * count:
            router.ended(open_routes.pop(rng.randrange(len(open_routes))))
    return len(prompts) / (time.perf_counter() - start)


def simulated(counts: list[int], requests_each: int) -> None:
    print(f"{'trace':<16} {'replicas':>8}  {'policy':<12} {'hits':>5}  {'TTFT p50':>8}  {'p90':>7}")
    for name in TRACES:
        for count in counts:
            for policy in POLICIES:
                random.seed(0)
                router = Router(SIZE)
                router.route = ROUTE_OF[policy].__get__(router)  # type: ignore[method-assign]
                found = simulate(name, count, router, requests_each)
                p50, p90 = statistics.median(found.ttfts), statistics.quantiles(found.ttfts, n=10)[-1]
                print(
                    f"{name:<16} {count:>8}  {policy:<12} {found.hit_rate:>5.0%}  {p50:>7.2f}s  {p90:>6.2f}s",
                    flush=True,
                )


def real(repeat: int) -> None:
    """24 tenants with a system prompt of 480 tokens each, in two pools that hold half of them; requests arrive at random."""
    from nanoengine import AsyncLLMEngine, SamplingParams
    from nanoengine.builder import build_engine, read_config
    from nanoengine.replicas.engine import ReplicatedEngine

    options: dict[str, Any] = {"replicas": 2, "num_threads": 1, "num_kv_blocks": 500, "max_model_len": 600}
    config = read_config("demo", options | {"scheduling_policy": "mixed", "max_num_batched_tokens": 256})
    rng = random.Random(0)
    tenants = [[rng.randrange(300, 4000) for _ in range(480)] for _ in range(24)]
    prompts = [rng.choice(tenants) + [rng.randrange(300, 4000) for _ in range(20)] for _ in range(150)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    rows: dict[str, list[tuple[float, float, float]]] = {policy: [] for policy in POLICIES}
    engine = AsyncLLMEngine(lambda: build_engine(config).engine)
    own = engine.engine
    assert isinstance(own, ReplicatedEngine)
    router = own.fleet.router

    async def arrive(gap: float) -> list[Any]:
        """Requests that come one after the other, whatever runs; returns their outputs."""
        delays, streams = random.Random(1), []
        for prompt in prompts:
            streams.append(engine.submit(engine.make_request(prompt, params)))
            await asyncio.sleep(delays.expovariate(1 / gap))
        for stream in streams:
            await stream.end()
        return [stream.request.output() for stream in streams]

    try:
        for _ in range(repeat):
            for policy in POLICIES:
                own.reset_prefix_cache()
                time.sleep(0.2)
                random.seed(0)
                router.route = ROUTE_OF[policy].__get__(router)  # type: ignore[method-assign]
                outputs = asyncio.run(arrive(gap=0.05))
                ttfts = [output.metrics.ttft for output in outputs]
                hits = sum(output.num_cached_tokens for output in outputs) / sum(map(len, prompts))
                rows[policy].append((hits, statistics.median(ttfts), statistics.quantiles(ttfts, n=10)[-1]))
    finally:
        engine.close()
    for policy, found in rows.items():
        hits, p50, p90 = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{policy:<12} hits {hits:.0%}  TTFT p50 {1e3 * p50:.0f} ms  p90 {1e3 * p90:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "simulate", "real"))
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 100, 1000])
    parser.add_argument("--requests", type=int, default=40, help="of each simulated replica")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    if args.what == "speed":
        speed()
    elif args.what == "simulate":
        simulated(args.replicas, args.requests)
    else:
        real(args.repeat)


if __name__ == "__main__":
    main()
