"""Choose the sizes of kernels for the GPU that is there, and keep the choice where every start finds it (`Tuning.save`).

    python -m benchmarks.gpu.tune --save tune.json

Decode attention is measured in every candidate on steps of the workload of 256 requests: the fastest over all of them is kept.
Then an engine is started for each way of launching the steps of one stream, as long as there is time.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from time import perf_counter
from unittest.mock import patch

import torch

from benchmarks.drive import drive
from benchmarks.figures import latency_figures
from benchmarks.gpu.clock import device_facts
from benchmarks.gpu.kernel_bench import Bench, caches, lens_of_workload, memory_for, step, tokens_in_blocks
from benchmarks.gpu.kernels import add_bench_options, new_bench
from benchmarks.gpu.parts import kept_going
from benchmarks.options import positive_int
from benchmarks.random_weights import random_checkpoint
from benchmarks.report import Report
from benchmarks.workload import Workload
from nanoengine import LLM, SamplingParams
from nanoengine.attention.triton import TritonAttention
from nanoengine.core.attention import AttentionSpec
from nanoengine.kernels.triton.paged_decode import CANDIDATES
from nanoengine.kernels.triton.tuning import DEFAULTS, Tuning

PROGRAMS_PER_SM = (4, 8)
LONGEST_PARTS = (512, 1024, 2048)

LAUNCHES = ((False, 8), (True, 8), (False, 0), (True, 0))
"""Whether launches depend on each other, and up to how many rows products are computed by our own kernel; the default first."""

PROMPT, NEW = 1024, 129
REPEATS = 3
"""Of one stream, after one that does not count."""


def main(arguments: Sequence[str]) -> int:
    args = _parser().parse_args(arguments)
    deadline = perf_counter() + args.seconds
    report = Report("gpu_tune", device_facts(torch.device(args.device)))
    bench = new_bench(args, report)
    best = DEFAULTS
    with kept_going(report, "decode attention"):
        best = fastest_decode(bench, candidates()[: args.candidates])
        keep(bench, best)
    if args.device == "cuda":
        with kept_going(report, "one stream"), random_checkpoint(args.shape) as model:
            best = fastest_stream(bench, model, best, deadline)
    report.show()
    print("chosen:", ", ".join(f"{name} {value}" for name, value in asdict(best).items()))
    return 1 if "failed" in report.facts else 0


def keep(bench: Bench, best: Tuning) -> None:
    """For all later starts, and in the report."""
    bench.report.facts["chosen"] = asdict(best)
    if bench.device.type == "cuda":
        best.save(torch.cuda.get_device_name())
    if bench.args.save:
        bench.report.save(bench.args.save)


# ---- decode attention


def candidates() -> list[Tuning]:
    """The default first."""
    found = [
        replace(
            DEFAULTS,
            decode_tile=tile,
            decode_warps=warps,
            decode_stages=stages,
            decode_programs_per_sm=programs,
            decode_longest_part=longest,
        )
        for (tile, warps, stages), programs, longest in product(CANDIDATES, PROGRAMS_PER_SM, LONGEST_PARTS)
    ]
    return sorted(found, key=lambda tuning: tuning != DEFAULTS)


@torch.inference_mode()
def fastest_decode(bench: Bench, tunings: Sequence[Tuning]) -> Tuning:
    """The least time over all steps. In the workload, sequences end evenly, so that each of its steps stands for as many."""
    steps = [lens_of_workload(count, bench.args.scale) for count in bench.args.ragged]
    seconds = dict.fromkeys(tunings, 0.0)
    for lens in steps:
        with memory_for(bench, tokens_in_blocks(bench, lens)) as memory:
            for tuning in tunings:
                seconds[tuning] += _time_decode(bench, tuning, lens, memory)
    total_bytes = sum(map(bench.decode_bytes, steps))
    for tuning in sorted(tunings, key=seconds.__getitem__):
        case = {"work": "decode, all steps", **_decode_case(tuning)}
        share = total_bytes / seconds[tuning] / bench.rates.bytes_s
        bench.report.add(case, {"us": 1e6 * seconds[tuning], "bandwidth_share": share})
    return min(tunings, key=seconds.__getitem__)


def _time_decode(bench: Bench, tuning: Tuning, lens: list[int], memory: torch.Tensor) -> float:
    """Seconds of one step; a candidate that does not run here, or gives something else, takes for ever."""
    backend = TritonAttention(bench.args.block_size, tuning)
    cache = caches(bench, backend, memory)
    metadata = step(bench, cache, [1] * len(lens), lens)
    q = bench.random(len(lens), bench.model.num_heads, bench.model.head_dim)
    arguments = q, cache, metadata, AttentionSpec(bench.model.head_dim**-0.5)
    try:
        found, expected = (b.attend(*arguments) for b in (backend, TritonAttention(bench.args.block_size, DEFAULTS)))
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
        seconds = bench.clock.seconds(partial(backend.attend, *arguments))
    except Exception as error:  # more shared memory than there is, say: Triton and torch have no error in common
        bench.report.warn(f"left out: {_decode_case(tuning)}: {error}")
        return float("inf")
    share = bench.decode_bytes(lens) / seconds / bench.rates.bytes_s
    case = {"work": "decode", "num_seqs": len(lens), **_decode_case(tuning)}
    bench.report.add(case, {"us": 1e6 * seconds, "bandwidth_share": share})
    return seconds


def _decode_case(tuning: Tuning) -> dict[str, int | bool]:
    return {name.removeprefix("decode_"): value for name, value in asdict(tuning).items() if name.startswith("decode_")}


# ---- one stream


def fastest_stream(bench: Bench, model: str, best: Tuning, deadline: float) -> Tuning:
    """The least time per output token of a single request, among those that give the tokens of the first."""
    least, right = float("inf"), None
    for dependent, rows in LAUNCHES:
        if perf_counter() > deadline:
            bench.report.warn("left out: some ways of launching, for want of time")
            break
        tuning = replace(best, dependent_launch=dependent, most_product_rows=rows)
        tpot, tokens = stream_tpot_ms(model, tuning)
        right = tokens if right is None else right
        equal = sum(mine == theirs for mine, theirs in zip(tokens, right, strict=True)) / len(right)
        case = {"work": "one stream", "dependent_launch": dependent, "most_product_rows": rows}
        bench.report.add(case, {"tpot_ms": tpot, "equal_tokens": equal})
        # Other products round otherwise, and one close call changes all tokens behind it; another launch of the same must not.
        if rows == LAUNCHES[0][1] and equal < 1:
            bench.report.warn(f"refused: {case} changes tokens")
        elif tpot < least:
            best, least = tuning, tpot
        keep(bench, best)
    return best


def stream_tpot_ms(model: str, tuning: Tuning) -> tuple[float, list[int]]:
    """The least of some, on an engine that was started with this tuning; and what it says to a prompt."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, NANOENGINE_TUNING=folder):
        tuning.save(torch.cuda.get_device_name())
        with LLM(model, tokenizer="demo", max_model_len=2048, max_num_seqs=1, use_tqdm=False) as llm:
            found = []
            for seed in range(1 + REPEATS):
                work = Workload([[(seed + 7 * i) % 1000 for i in range(PROMPT)]], [NEW])
                run = drive(llm.engine, work, lambda _: None, temperature=0.0)
                found.append(latency_figures(run.requests)["tpot_ms"])
            greedy = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
            (output,) = llm.generate([list(range(1, 200))], greedy, use_tqdm=False)
            return min(found[1:]), output.outputs[0].token_ids


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gpu_tune", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--candidates", type=positive_int, help="of decode attention, the first of them (default: all)")
    parser.add_argument("--seconds", type=positive_int, default=180, help="after which no further engine is started")
    add_bench_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
