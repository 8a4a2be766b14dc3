"""The scheduler and the block manager alone, without a model: what the engine's own bookkeeping costs.

nano-vllm's workload, all sequences at once, under each policy, with blocks for all of them (`pool` plenty) and with a quarter of
that, where sequences are preempted all the time; with --pool-blocks, with pools of those sizes instead. Timed are
`Scheduler.schedule` and `Scheduler.update`: admission, block tables, hashing, prefix look-ups, preemption, appending tokens,
finishing. The sampled tokens come from nowhere. --swap adds a host tier as large as the pool, to which victims are copied, and
the events of the cache, which are drained after each step: every feature on. --windows adds KV groups that see no more than the
last so many tokens, one for each number. --depth 2 makes each plan before the results of the
one before it are taken, as overlapping steps do. The last row is the hashing of one long prompt.
"""

from __future__ import annotations

import argparse
import gc
from collections import deque
from itertools import product
from time import perf_counter
from typing import Any

from tqdm import tqdm

from benchmarks.drive import STEPS_PER_WASTE_SAMPLE, count_wasted_slots
from benchmarks.figures import Figures, percentiles
from benchmarks.options import BadOption, add_run_options, check_range, positive_int
from benchmarks.report import Case, Report
from benchmarks.workload import NANO_VLLM, Workload, random_workload
from nanoengine import SamplingParams
from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.groups import WINDOW, Groups, KVSpec
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.messages import StepPlan, StepResult
from nanoengine.engine.preemption import Preemption
from nanoengine.engine.scheduler import POLICIES, Scheduler
from nanoengine.engine.sequence import Sequence

SHARES = {"plenty": 1.0, "a quarter": 0.25}
MAX_NUM_BATCHED_TOKENS = 16384  # as nano-vllm's default
VOCAB_SIZE = 10001
SAMPLED_TOKEN = 7
LONG_PROMPT = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count: dict[str, Any] = {"type": positive_int, "nargs": "+", "metavar": "N"}
    parser.add_argument("--num-seqs", **count, default=[16, 256, 1024, 4096])
    parser.add_argument("--pool-blocks", **count, help="pools of these sizes, instead of plenty and a quarter")
    parser.add_argument("--input-len", type=positive_int, nargs=2, default=NANO_VLLM.input_len, metavar=("LOW", "HIGH"))
    parser.add_argument(
        "--output-len", type=positive_int, nargs=2, default=NANO_VLLM.output_len, metavar=("LOW", "HIGH")
    )
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=POLICIES, help="(default: all)")
    parser.add_argument("--depth", **count, default=[1], help="plans in flight (default: 1)")
    parser.add_argument("--block-size", type=positive_int, default=16)
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--swap", action="store_true", help="a host tier, preemption by swapping, and events")
    parser.add_argument(
        "--windows", type=positive_int, nargs="+", default=[], metavar="TOKENS", help="of more KV groups"
    )
    add_run_options(parser, repeat=3)


def groups_of(args: argparse.Namespace) -> Groups:
    """One that sees all, and those of --windows."""
    windows = (KVSpec(WINDOW, size) for size in args.windows)
    return Groups((KVSpec(), *windows), args.block_size, MAX_NUM_BATCHED_TOKENS)


def run(args: argparse.Namespace, report: Report) -> None:
    inputs = check_range("--input-len", tuple(args.input_len))
    outputs = check_range("--output-len", tuple(args.output_len))
    if args.swap and args.no_prefix_caching:
        raise BadOption("--swap finds blocks by their prefixes: leave --no-prefix-caching out")
    for repetition in range(args.repeat):
        for count in args.num_seqs:
            workload = random_workload(count, inputs, outputs, VOCAB_SIZE, args.seed)
            pools = pool_sizes(workload, args)
            for name, policy, depth in product(pools, args.policy, args.depth):
                case: Case = {"num_seqs": count, "policy": policy, "depth": depth, "pool": name}
                scheduler = make_scheduler(workload, pools[name], policy, args)
                label = f"{count} sequences, {policy}, {name}, {repetition + 1} of {args.repeat}"
                with tqdm(total=workload.num_output_tokens, desc=label, unit="token", leave=False, disable=None) as bar:
                    report.add(case, time_scheduler(scheduler, workload, depth, bar))
        report.add({"prompt_tokens": LONG_PROMPT}, time_hashing(args))


def pool_sizes(workload: Workload, args: argparse.Namespace) -> dict[str, int]:
    """Blocks of each pool to try. `plenty` holds all sequences at their full lengths; every pool holds one of them at least."""
    if args.pool_blocks:
        return {f"{size} blocks": size for size in args.pool_blocks}
    lens = [len(prompt) + count for prompt, count in zip(workload.prompts, workload.output_lens, strict=True)]
    blocks = groups_of(args).blocks_at_once
    plenty, least = sum(map(blocks, lens)), blocks(max(lens) + 1)
    return {name: max(int(plenty * share), least) for name, share in SHARES.items()}


def make_scheduler(workload: Workload, num_blocks: int, policy: str, args: argparse.Namespace) -> Scheduler:
    longest = max(len(prompt) + count for prompt, count in zip(workload.prompts, workload.output_lens, strict=True)) + 1
    groups = groups_of(args)
    if groups.blocks_at_once(longest) > num_blocks:
        raise BadOption(f"--pool-blocks {num_blocks}: the longest sequence takes {groups.blocks_at_once(longest)}")
    host = HostTier(num_blocks) if args.swap else None
    options: dict[str, Any] = {"specs": groups.specs, "most_new_tokens": groups.most_new}
    manager = BlockManager(num_blocks, args.block_size, not args.no_prefix_caching, host=host, **options)
    manager.collect_events = args.swap
    return Scheduler(
        manager,
        max_num_seqs=len(workload),
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=longest,
        preemption=Preemption("swap" if args.swap else "recompute"),
        policy=policy,
    )


def time_hashing(args: argparse.Namespace) -> Figures:
    """Milliseconds to look a long prompt up in an empty cache, and to publish its blocks."""
    prompt = random_workload(1, (LONG_PROMPT, LONG_PROMPT), (1, 1), VOCAB_SIZE, args.seed).prompts[0]
    manager = BlockManager(LONG_PROMPT // args.block_size + 2, args.block_size)
    seq = Sequence(0, prompt, SamplingParams())
    start = perf_counter()
    manager.admit(seq)
    admitted = perf_counter()
    manager.publish(seq, LONG_PROMPT)
    return {"hash_ms": 1000 * (admitted - start), "publish_ms": 1000 * (perf_counter() - admitted)}


def time_scheduler(scheduler: Scheduler, workload: Workload, depth: int, bar: tqdm) -> Figures:
    """Run a workload to its end, with so many plans in flight; microseconds of the two calls, over steps and over generated
    tokens."""
    for i, (prompt, count) in enumerate(zip(workload.prompts, workload.output_lens, strict=True)):
        scheduler.add(Sequence(i, prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count)))
    in_flight: deque[StepPlan] = deque()
    times: list[float] = []
    wasted = slots = 0
    gc.collect()
    while scheduler.has_unfinished:
        start = perf_counter()
        while len(in_flight) < depth and (plan := scheduler.schedule()):
            in_flight.append(plan)
        scheduled = perf_counter()
        plan = in_flight.popleft()
        result = StepResult([SAMPLED_TOKEN] * plan.num_samples)
        executed = perf_counter()
        scheduler.update(plan, result)
        scheduler.block_manager.drain_events()  # none without --swap
        times.append(1e6 * (perf_counter() - executed + scheduled - start))
        if len(times) % STEPS_PER_WASTE_SAMPLE == 0:
            more_wasted, more_slots = count_wasted_slots(scheduler)
            wasted, slots = wasted + more_wasted, slots + more_slots
        bar.update(plan.num_samples)
    return (
        {"us_per_token": sum(times) / workload.num_output_tokens}
        | percentiles("us_per_step", times, detailed=True)
        | {
            "steps": float(len(times)),
            "preemptions": float(scheduler.num_preemptions),
            "kv_waste": wasted / slots if slots else 0.0,
        }
    )
