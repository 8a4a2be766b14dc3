"""TTFT, TPOT and tokens per second of the engine on this machine, beside the bandwidth limit of the same machine.

python bench.py                                    the bundled model: 32 requests, prompts of 16-256, outputs of 16-128 tokens
python bench.py --model FOLDER --num-seqs 256 --input-len 100 1024 --output-len 100 1024

Prompts are random token ids, end-of-text tokens are ignored, sampling is at temperature 0.6. A warm-up run goes first; then
each repetition draws new prompts, so that no prefix is ever cached, and medians are printed with their range.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers

import nanoengine
from nanoengine import LLM, RequestOutput, SamplingParams
from nanoengine.errors import NanoEngineError
from nanoengine.runner.model_runner import ModelRunner


def measure_read_bandwidth(device: torch.device, num_bytes: int = 1 << 30, repetitions: int = 5) -> float:
    """Bytes per second at which this device reads memory: the best of a few maxima over a large tensor."""
    data = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device)
    best = float("inf")
    for _ in range(repetitions):
        start = perf_counter()
        data.max().item()
        best = min(best, perf_counter() - start)
    return num_bytes / best


def run_once(llm: LLM, args: argparse.Namespace, rng: random.Random) -> tuple[float, list[RequestOutput]]:
    """Generate the workload once; returns the wall time in seconds and the results."""
    highest = min(9999, llm.model_config.vocab_size - 1)
    prompts = [[rng.randint(0, highest) for _ in range(rng.randint(*args.input_len))] for _ in range(args.num_seqs)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(*args.output_len))
        for _ in range(args.num_seqs)
    ]
    start = perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=not args.quiet)
    return perf_counter() - start, outputs


def decode_floor(llm: LLM, bandwidth: float, mean_context: float, num_seqs: int) -> float:
    """Least seconds of one decode step: every weight and every cached K/V of the batch is read once."""
    runner = llm.engine.executor
    assert isinstance(runner, ModelRunner)
    item = runner.dtype.itemsize
    num_weights = llm.model_config.num_parameters()
    if not llm.model_config.tie_word_embeddings:  # of an untied embedding only a few rows are read
        num_weights -= llm.model_config.vocab_size * llm.model_config.hidden_size
    return (num_weights * item + num_seqs * mean_context * llm.model_config.kv_bytes_per_token(item)) / bandwidth


def spread(values: list[float], unit: str, digits: int = 1) -> str:
    return f"{median(values):.{digits}f} {unit} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-seqs", type=int, default=32)
    parser.add_argument("--input-len", type=int, nargs=2, default=(16, 256), metavar=("LOW", "HIGH"))
    parser.add_argument("--output-len", type=int, nargs=2, default=(16, 128), metavar=("LOW", "HIGH"))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    args = parser.parse_args()
    rng = random.Random(args.seed)

    with LLM(args.model, dtype=args.dtype, device=args.device, use_tqdm=not args.quiet) as llm:
        runner = llm.engine.executor
        assert isinstance(runner, ModelRunner)
        bandwidth = measure_read_bandwidth(runner.device)
        run_once(llm, args, random.Random(args.seed - 1))  # warm-up
        stats = llm.engine.stats
        result: dict[str, list[float]] = {
            "output_tok_s": [],
            "prefill_tok_s": [],
            "decode_tok_s": [],
            "ttft_ms": [],
            "tpot_ms": [],
        }
        floors = []
        for _ in range(args.repeat):
            before = (
                stats.prefill_tokens,
                stats.prefill_time,
                stats.decode_tokens,
                stats.decode_time,
                stats.num_decode_steps,
            )
            seconds, outputs = run_once(llm, args, rng)
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            result["output_tok_s"].append(num_tokens / seconds)
            result["prefill_tok_s"].append((stats.prefill_tokens - before[0]) / (stats.prefill_time - before[1]))
            decode_time = stats.decode_time - before[3]
            result["decode_tok_s"].append((stats.decode_tokens - before[2]) / decode_time)
            result["ttft_ms"].append(1000 * median(output.metrics.ttft or 0.0 for output in outputs))
            result["tpot_ms"].append(
                1000 * median(output.metrics.tpot or 0.0 for output in outputs if output.metrics.tpot)
            )
            steps = stats.num_decode_steps - before[4]
            context = sum(
                (len(o.prompt_token_ids) + len(o.outputs[0].token_ids) / 2) * len(o.outputs[0].token_ids)
                for o in outputs
            )
            mean_rows = (stats.decode_tokens - before[2]) / steps
            floor = decode_floor(llm, bandwidth, context / num_tokens, round(mean_rows))
            floors.append(floor * steps / decode_time)

        print(
            f"\n{args.num_seqs} requests, prompts {args.input_len}, outputs {args.output_len}, {args.repeat} repetitions"
        )
        print(f"throughput   {spread(result['output_tok_s'], 'output tok/s', 0)}")
        print(f"prefill      {spread(result['prefill_tok_s'], 'tok/s', 0)}")
        print(f"decode       {spread(result['decode_tok_s'], 'tok/s', 0)}")
        print(f"TTFT         {spread(result['ttft_ms'], 'ms')}, median over requests, queueing included")
        print(f"TPOT         {spread(result['tpot_ms'], 'ms', 2)}, median over requests")
        print(
            f"limit        {bandwidth / 1e9:.1f} GB/s read; decode reaches {spread([100 * f for f in floors], '%')} of it"
        )
        summary: dict[str, Any] = {
            name: {"median": median(values), "min": min(values), "max": max(values)} for name, values in result.items()
        }
        summary |= {
            "config": vars(args)
            | {"backend": runner.backend.name, "dtype": str(runner.dtype), "device": str(runner.device)},
            "read_gb_s": bandwidth / 1e9,
            "decode_share_of_limit": median(floors),
            "versions": {
                "nanoengine": nanoengine.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "threads": torch.get_num_threads(),
        }
        print(json.dumps(summary))


if __name__ == "__main__":
    try:
        main()
    except NanoEngineError as error:
        sys.exit(f"{type(error).__name__}: {error}")
