"""The kernels of the CUDA path one by one, each beside the least time in which the device could move its bytes or multiply.

    python -m benchmarks.gpu.kernels --save kernels.json

Times are medians, of the device alone. Large kernels are timed with the cache flushed before each, small ones many in a row, as
in a recorded step. On a CPU it runs the CPU's kernels, so that the program itself can be tried; the figures mean little there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.attention_kernels import (
    decode_attention,
    prefill_attention,
    ragged_decode_attention,
    rotate_and_write,
    windowed_decode_attention,
)
from benchmarks.gpu.clock import Clock, device_facts, measure_rates
from benchmarks.gpu.kernel_bench import Bench
from benchmarks.gpu.parts import kept_going
from benchmarks.gpu.row_kernels import (
    placing,
    products,
    products_of_few_rows,
    quantized_products,
    rows_of_a_layer,
    sampling,
)
from benchmarks.gpu.state_kernels import states
from benchmarks.options import positive_int
from benchmarks.random_weights import SHAPES
from benchmarks.report import Report
from nanoengine.kernels.capability import choose_kernels
from nanoengine.models.architectures import read_model_config

PARTS: dict[str, Callable[[Bench], None]] = {
    "decode": decode_attention,
    "ragged": ragged_decode_attention,
    "windowed": windowed_decode_attention,
    "few-rows": products_of_few_rows,
    "prefill": prefill_attention,
    "write": rotate_and_write,
    "rows": rows_of_a_layer,
    "products": products,
    "placing": placing,
    "sampling": sampling,
    "states": states,
    "quantized": quantized_products,
}
"""What is wanted most comes first."""


def main(arguments: Sequence[str]) -> int:
    args = _parser().parse_args(arguments)
    report = Report("gpu_kernels", device_facts(torch.device(args.device)))
    bench = new_bench(args, report)
    for name in args.parts:
        with torch.inference_mode(), kept_going(report, name):
            PARTS[name](bench)
        if args.save:
            report.save(args.save)  # after each part, so that whoever stops it loses no more than one
    report.show()
    return 1 if "failed" in report.facts else 0


def new_bench(args: argparse.Namespace, report: Report) -> Bench:
    """A clock, and what it says of the device."""
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    torch.manual_seed(0)
    clock = Clock(device, args.repeat)
    rates = measure_rates(clock, dtype)
    report.add({"kernel": "(device)"}, rates.figures)
    model = read_model_config(SHAPES[args.shape] | {"dtype": args.dtype})
    kernels = choose_kernels("auto" if device.type == "cuda" else "torch", device, dtype)
    return Bench(args, report, device, dtype, model, kernels, clock, rates)


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    several: dict[str, Any] = {"type": positive_int, "nargs": "+"}
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES, help="of the model (default: %(default)s)")
    parser.add_argument(
        "--ragged", **several, default=[256, 131, 40, 8], help="sequences of a step of the workload of 256 requests"
    )
    parser.add_argument("--scale", type=positive_int, default=1, help="divides the lengths of those (default: 1)")
    parser.add_argument("--block-size", type=positive_int, default=16, help="of the KV cache (default: 16)")
    parser.add_argument("--repeat", type=positive_int, default=30, help="times of each (default: 30)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON here")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gpu_kernels", description=__doc__.split("\n")[0] if __doc__ else None)
    several: dict[str, Any] = {"type": positive_int, "nargs": "+"}
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    parser.add_argument("--batch", **several, default=[1, 64, 256], help="sequences of a decode step")
    parser.add_argument("--context", **several, default=[1024, 2048, 8192], help="tokens of each of them")
    parser.add_argument("--prompt", **several, default=[1024, 4096], help="tokens of a prefill")
    parser.add_argument("--rows", **several, default=[1, 256, 8192], help="tokens of a step, for the small kernels")
    add_bench_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
