"""The scheduler and the block manager alone, without a model: what the engine's own bookkeeping costs.

nano-vllm's workload, all sequences at once, with blocks for all of them (`pool` plenty) and with a quarter of that, where
sequences are preempted all the time. Timed are `Scheduler.schedule` and `Scheduler.update`: admission, block tables,
hashing, prefix look-ups, preemption, appending tokens, finishing. The sampled tokens come from nowhere.
"""

from __future__ import annotations

import argparse
import gc
from time import perf_counter

from tqdm import tqdm

from benchmarks.drive import STEPS_PER_WASTE_SAMPLE, count_wasted_slots
from benchmarks.figures import Figures, percentiles
from benchmarks.options import add_run_options, check_range, positive_int
from benchmarks.report import Case, Report
from benchmarks.workload import NANO_VLLM, Workload, random_workload
from nanoengine import SamplingParams
from nanoengine.engine.block_manager import BlockManager
from nanoengine.engine.messages import SampledBatch
from nanoengine.engine.scheduler import Scheduler
from nanoengine.engine.sequence import Sequence

SHARES = {"plenty": 1.0, "a quarter": 0.25}
MAX_NUM_BATCHED_TOKENS = 16384  # as nano-vllm's default
VOCAB_SIZE = 10001
SAMPLED_TOKEN = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-seqs", type=positive_int, nargs="+", default=[16, 256, 1024, 4096], metavar="N")
    parser.add_argument("--input-len", type=positive_int, nargs=2, default=NANO_VLLM.input_len, metavar=("LOW", "HIGH"))
    parser.add_argument(
        "--output-len", type=positive_int, nargs=2, default=NANO_VLLM.output_len, metavar=("LOW", "HIGH")
    )
    parser.add_argument("--block-size", type=positive_int, default=16)
    parser.add_argument("--no-prefix-caching", action="store_true")
    add_run_options(parser, repeat=3)


def run(args: argparse.Namespace, report: Report) -> None:
    inputs = check_range("--input-len", tuple(args.input_len))
    outputs = check_range("--output-len", tuple(args.output_len))
    report.facts |= {"block_size": args.block_size, "prefix_caching": not args.no_prefix_caching}
    for repetition in range(args.repeat):
        for count in args.num_seqs:
            workload = random_workload(count, inputs, outputs, VOCAB_SIZE, args.seed)
            for name, share in SHARES.items():
                case: Case = {"num_seqs": count, "pool": name}
                scheduler = make_scheduler(workload, share, args.block_size, not args.no_prefix_caching)
                label = f"{count} sequences, {name}, {repetition + 1} of {args.repeat}"
                with tqdm(total=workload.num_output_tokens, desc=label, unit="token", leave=False, disable=None) as bar:
                    report.add(case, time_scheduler(scheduler, workload, bar))


def make_scheduler(workload: Workload, share: float, block_size: int, prefix_caching: bool) -> Scheduler:
    """A scheduler whose pool holds `share` of what all sequences take at their full lengths; one sequence at least."""
    lens = [len(prompt) + count for prompt, count in zip(workload.prompts, workload.output_lens, strict=True)]
    plenty = sum(-(-length // block_size) for length in lens)
    max_model_len = max(lens) + 1
    num_blocks = max(int(plenty * share), -(-max_model_len // block_size))
    return Scheduler(
        BlockManager(num_blocks, block_size, prefix_caching),
        max_num_seqs=len(workload),
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=max_model_len,
    )


def time_scheduler(scheduler: Scheduler, workload: Workload, bar: tqdm) -> Figures:
    """Run a workload to its end; microseconds of the two calls, over steps and over generated tokens."""
    for i, (prompt, count) in enumerate(zip(workload.prompts, workload.output_lens, strict=True)):
        scheduler.add(Sequence(i, prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count)))
    times: list[float] = []
    wasted = slots = 0
    gc.collect()
    while scheduler.has_unfinished:
        start = perf_counter()
        batch = scheduler.schedule()
        scheduled = perf_counter()
        sampled = SampledBatch([SAMPLED_TOKEN] * len(batch.sampling), [None] * len(batch.sampling))
        executed = perf_counter()
        scheduler.update(batch, sampled)
        times.append(1e6 * (perf_counter() - executed + scheduled - start))
        if len(times) % STEPS_PER_WASTE_SAMPLE == 0:
            more_wasted, more_slots = count_wasted_slots(scheduler)
            wasted, slots = wasted + more_wasted, slots + more_slots
        bar.update(len(batch.sampling))
    return (
        {"us_per_token": sum(times) / workload.num_output_tokens}
        | percentiles("us_per_step", times, detailed=True)
        | {
            "steps": float(len(times)),
            "preemptions": float(scheduler.num_preemptions),
            "kv_waste": wasted / slots if slots else 0.0,
        }
    )
