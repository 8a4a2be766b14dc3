"""Others on the same card, with the same shapes: transformers with a static cache and torch.compile, one stream.

    python -m benchmarks.gpu.peers --save peers.json

This is how plain torch comes near to the hardware (the recipe of gpt-fast): CUDA graphs of a compiled step; no pages, no batches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch
import transformers

from benchmarks.gpu.clock import device_facts
from benchmarks.options import positive_int
from benchmarks.random_weights import SHAPES
from benchmarks.report import Report

PEER = f"transformers {transformers.__version__}, static cache, torch.compile"


def main(arguments: Sequence[str]) -> int:
    args = _parser().parse_args(arguments)
    report = Report("gpu_peers", device_facts(torch.device(args.device)))
    shape = SHAPES[args.shape]
    with torch.device(args.device):
        config = getattr(transformers, shape["architectures"][0]).config_class(**shape)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    options = {"cache_implementation": "static", "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt, new = args.stream_len
    ids = torch.randint(shape["vocab_size"], (1, prompt), device=args.device)
    model.generation_config.cache_implementation = "static"
    if args.device == "cuda":
        model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)

    def run(num_tokens: int) -> float:
        start = perf_counter()
        out = model.generate(ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, **options)
        assert out.shape[1] == prompt + num_tokens
        if args.device == "cuda":
            torch.cuda.synchronize()
        return perf_counter() - start

    began = perf_counter()
    for _ in range(2):
        run(new)
    report.facts["compile_s"] = round(perf_counter() - began, 1)
    whole, first = (statistics.median(run(n) for _ in range(args.repeat)) for n in (new, 1))
    figures = {"ttft_ms": 1000 * first, "tpot_ms": 1000 * (whole - first) / (new - 1)}
    report.add({"work": "one stream", "input_len": prompt, "output_len": new}, figures, PEER)
    report.save(args.save)
    report.show()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gpu_peers", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES, help="of the model (default: %(default)s)")
    parser.add_argument("--stream-len", type=positive_int, nargs=2, metavar=("PROMPT", "NEW"), default=(1024, 129))
    parser.add_argument("--repeat", type=positive_int, default=5)
    parser.add_argument("--save", type=Path, default=Path("peers.json"), help="write the JSON here")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
