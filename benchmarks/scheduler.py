"""The scheduler and the block manager alone, without a model: what the policy costs in a step.

nano-vllm's workload, all sequences at once, with blocks for all of them (`pool` plenty) and with a quarter of that, where
sequences are preempted. Timed is the CPU time of `Scheduler.schedule` and `Scheduler.commit`: admission, block tables, hashing,
look-ups of prefixes, preemption, appending tokens, ending. The sampled tokens come from nowhere. It is measured without any
capability, and with all of them: their policy parts and stores, as an engine with every option has them.
--depth 2 schedules each step before the result of the one before it is taken.
"""

from __future__ import annotations

import argparse
import gc
from collections import Counter
from itertools import product
from time import process_time
from typing import Any, cast

from tqdm import tqdm

from benchmarks.figures import Figures, percentiles
from benchmarks.options import add_run_options, check_range, positive_int
from benchmarks.progress import bar
from benchmarks.report import ENGINE, Case, Report
from benchmarks.workload import NANO_VLLM, Workload, random_workload
from nanoengine import SamplingParams
from nanoengine.core.block_manager import BlockManager
from nanoengine.core.config import POLICIES
from nanoengine.core.messages import StepPlan, StepResult
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.seams import KVStore, PolicyPart
from nanoengine.core.sequence import Request, Sequence
from nanoengine.features.fairness.block_share import BlockShare
from nanoengine.features.fairness.clients import Clients
from nanoengine.features.fairness.time_share import TimeShare
from nanoengine.features.kv_groups.common_prefix import CommonPrefix
from nanoengine.features.kv_offload.host_tier import HostTier
from nanoengine.features.kv_offload.offload import Offload
from nanoengine.features.observability.observer import Observer
from nanoengine.features.pooling.files import PoolingDefaults
from nanoengine.features.pooling.pooler import Pooler
from nanoengine.features.sampling.collector import Collector
from nanoengine.features.sampling.thinking import ThinkingPart
from nanoengine.features.speculation.ngram import NgramProposer
from nanoengine.features.speculation.speculation import Speculation
from nanoengine.features.structured.grammars import Grammars
from nanoengine.features.structured.mask_filling import GrammarPolicy

EVERYTHING = "with all capabilities"
SHARES = {"plenty": 1.0, "a quarter": 0.25}
MAX_NUM_BATCHED_TOKENS = 16384  # as nano-vllm's default
VOCAB_SIZE = 10001
NUM_CLIENTS = 4  # whom the requests come from, where that matters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count: dict[str, Any] = {"type": positive_int, "nargs": "+", "metavar": "N"}
    parser.add_argument("--num-seqs", **count, default=[256, 1024], help="(default: 256 1024)")
    parser.add_argument("--input-len", type=positive_int, nargs=2, default=NANO_VLLM[1], metavar=("LOW", "HIGH"))
    parser.add_argument("--output-len", type=positive_int, nargs=2, default=NANO_VLLM[2], metavar=("LOW", "HIGH"))
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=POLICIES, help="(default: all)")
    parser.add_argument("--depth", **count, default=[1], help="steps in flight (default: 1)")
    parser.add_argument("--block-size", type=positive_int, default=16)
    add_run_options(parser, repeat=3)


def run(args: argparse.Namespace, report: Report) -> None:
    inputs = check_range("--input-len", tuple(args.input_len))
    outputs = check_range("--output-len", tuple(args.output_len))
    for _ in range(args.repeat):
        for count in args.num_seqs:
            workload = random_workload(count, inputs, outputs, VOCAB_SIZE, args.seed)
            pools = pool_sizes(workload, args.block_size)
            for pool, policy, depth, engine in product(pools, args.policy, args.depth, (ENGINE, EVERYTHING)):
                case: Case = {"num_seqs": count, "policy": policy, "depth": depth, "pool": pool}
                blocks, parts = all_parts(workload, pools[pool], args.block_size)
                if engine == ENGINE:
                    blocks, parts = BlockManager(pools[pool], args.block_size), []
                with bar(", ".join([*map(str, case.values()), engine]), total=workload.num_output_tokens) as shown:
                    report.add(case, measure(Core(workload, blocks, parts, policy, depth), workload, shown), engine)


def pool_sizes(workload: Workload, block_size: int) -> dict[str, int]:
    """Blocks of each pool. `plenty` holds all sequences at their full lengths; every pool holds the longest of them."""
    lens = [len(prompt) + count for prompt, count in zip(workload.prompts, workload.output_lens, strict=True)]
    blocks = [-(-length // block_size) for length in lens]
    return {name: max(int(sum(blocks) * share), max(blocks) + 1) for name, share in SHARES.items()}


def measure(core: Core, workload: Workload, shown: tqdm) -> Figures:
    """Run a workload to its end; microseconds over steps and over generated tokens."""
    times: list[float] = []
    gc.collect()
    while core.scheduler.has_unfinished:
        seconds, num_tokens = core.step()
        times.append(1e6 * seconds)
        shown.update(num_tokens)
    figures = {"us_per_token": sum(times) / workload.num_output_tokens}
    figures |= percentiles("us_per_step", times, detailed=True) | {"steps": float(len(times))}
    return figures | {"preemptions": float(core.scheduler.num_preemptions)}


def all_parts(workload: Workload, num_blocks: int, block_size: int) -> tuple[BlockManager, list[PolicyPart]]:
    """What capabilities add to the policy, in the order in which they start up. Host memory has as many blocks as the pool."""
    stores: list[KVStore] = []
    blocks = BlockManager(num_blocks, block_size, stores=stores)
    speculation = Speculation(NgramProposer(), num_drafts=15, vocab_size=VOCAB_SIZE, step_tokens=32)
    offload, collector = Offload(HostTier(num_blocks), None, 1), Collector()
    parts: list[PolicyPart] = []
    counts: Counter[str] = Counter()
    most, num_rows = MAX_NUM_BATCHED_TOKENS, len(workload)
    time = TimeShare(counts, blocks, num_rows, most, most, is_mixed=False)
    clients, observer = Clients(counts, time, BlockShare(blocks, num_rows, counts), parts), Observer(longest(workload))
    stores += [offload, observer.events]
    structured = GrammarPolicy(Grammars(cast(Any, None), VOCAB_SIZE, ()))  # asked for by nobody
    pooler = Pooler(PoolingDefaults(), hidden_size=16)  # asked for by nobody too
    thinking = ThinkingPart(cast(Any, None))  # nor is this
    parts += [CommonPrefix(blocks), speculation, offload, collector, thinking, structured, pooler, clients, observer]
    return blocks, parts


def longest(workload: Workload) -> int:
    return max(len(prompt) + count for prompt, count in zip(workload.prompts, workload.output_lens, strict=True))


class Core:
    """Our scheduler with a workload."""

    def __init__(self, workload: Workload, blocks: BlockManager, parts: list[PolicyPart], policy: str, depth: int):
        self.depth = depth
        self.scheduler = Scheduler(
            blocks,
            max_num_seqs=len(workload),
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            policy=policy,
            parts=parts,
        )
        for i, (prompt, count) in enumerate(zip(workload.prompts, workload.output_lens, strict=True)):
            params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count)
            request = Request(str(i), None, prompt, params, client=str(i % NUM_CLIENTS))
            request.sequences = [Sequence(i, request)]
            self.scheduler.add(request.sequences[0])
            for part in parts:
                part.submitted(request)

    def step(self) -> tuple[float, int]:
        """CPU seconds of the policy in the next step, and how many tokens came of it."""
        scheduler = self.scheduler
        start = process_time()
        while len(scheduler.in_flight) < self.depth and scheduler.schedule():
            pass
        step = scheduler.in_flight[0]
        scheduled = process_time()
        result = sample(step.number, step.plan)
        sampled = process_time()
        seqs = scheduler.commit(result)
        parts = [part for part in scheduler.parts if not part.is_idle]  # as the engine tells them
        for part in parts:
            part.after_step(step, result, seqs)
        for seq in seqs:
            if seq.finished:
                seq.request.num_finished += 1
                for part in parts:
                    part.finished(seq)
        return process_time() - sampled + scheduled - start, len(seqs)


def sample(step: int, plan: StepPlan) -> StepResult:
    """Tokens that hardly repeat themselves. No draft is accepted."""
    return StepResult([(31 * step + i) % VOCAB_SIZE for i in range(plan.num_samples)], [0] * plan.num_drafted)
