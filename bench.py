"""TTFT, TPOT and tokens per second on this machine, beside the bandwidth that limits them and, if asked, beside transformers.

python bench.py                                    the bundled model; a stream of 128 + 128 tokens, then 32 requests at once
python bench.py --vs transformers                  the same weights, prompts and lengths in transformers, in the same run
python bench.py --model FOLDER --num-seqs 256 --input-len 100 1024 --output-len 100 1024

Prompts are random token ids, end-of-text tokens are ignored, sampling is at temperature 0.6. A warm-up goes first; then every
repetition draws new prompts, so that no prefix is ever cached. Figures are medians, with their range.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

import nanoengine
from nanoengine import LLM, SamplingParams
from nanoengine.errors import NanoEngineError
from nanoengine.models.loader import find_model
from nanoengine.runner.model_runner import ModelRunner

TEMPERATURE = 0.6
STREAM_TOKENS = 128  # prompt and output of the single stream

Figures = dict[str, float]


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, and how many tokens to generate for each."""

    prompts: list[list[int]]
    output_lens: list[int]

    @classmethod
    def draw(
        cls, rng: random.Random, count: int, input_len: tuple[int, int], output_len: tuple[int, int], vocab: int
    ) -> Workload:
        prompts = [[rng.randint(0, min(9999, vocab - 1)) for _ in range(rng.randint(*input_len))] for _ in range(count)]
        return cls(prompts, [rng.randint(*output_len) for _ in range(count)])


def run_stream(llm: LLM, work: Workload, bandwidth: float) -> Figures:
    """One request by itself."""
    output = _generate(llm, work)[0][0]
    ttft, tpot = output.metrics.ttft or 0.0, output.metrics.tpot or 0.0
    context = len(output.prompt_token_ids) + work.output_lens[0] / 2
    floor = least_step_seconds(llm, bandwidth, num_seqs=1, context=context)
    return {"ttft_ms": 1000 * ttft, "tpot_ms": 1000 * tpot, "tpot_share_of_limit": floor / tpot}


def run_batch(llm: LLM, work: Workload, bandwidth: float) -> Figures:
    """All requests at once."""
    before = copy.copy(llm.engine.stats)
    _, seconds = _generate(llm, work)
    stats = llm.engine.stats.since(before)
    total = sum(work.output_lens)
    context = sum((len(p) + n / 2) * n for p, n in zip(work.prompts, work.output_lens, strict=True)) / total
    figures = {"output_tok_s": total / seconds, "prefill_tok_s": stats.prefill_rate}
    if stats.num_decode_steps:  # outputs of one token need none
        rows = stats.decode_tokens / stats.num_decode_steps
        floor = stats.num_decode_steps * least_step_seconds(llm, bandwidth, num_seqs=rows, context=context)
        figures |= {"decode_tok_s": stats.decode_rate, "decode_share_of_limit": floor / stats.decode_time}
    return figures


def _generate(llm: LLM, work: Workload) -> tuple[list[nanoengine.RequestOutput], float]:
    params = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in work.output_lens]
    start = perf_counter()
    return llm.generate(work.prompts, params, use_tqdm=False), perf_counter() - start


class Transformers:
    """The same work in transformers' `generate`: one left-padded batch, of which only the wanted tokens are counted."""

    def __init__(self, folder: str, dtype: torch.dtype, device: torch.device):
        self.device = device
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        self.model.generation_config.eos_token_id = None  # end-of-text tokens are ignored

    def stream(self, work: Workload) -> Figures:
        first = self._seconds(Workload(work.prompts, [1]))
        seconds = self._seconds(work)
        return {"ttft_ms": 1000 * first, "tpot_ms": 1000 * (seconds - first) / (work.output_lens[0] - 1)}

    def batch(self, work: Workload) -> Figures:
        return {"output_tok_s": sum(work.output_lens) / self._seconds(work)}

    @torch.inference_mode()
    def _seconds(self, work: Workload) -> float:
        rows = [torch.tensor(prompt) for prompt in work.prompts]
        ids = pad_sequence(rows, batch_first=True, padding_side="left").to(self.device)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left").to(
            self.device
        )
        options = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "pad_token_id": 0}
        start = perf_counter()
        out = self.model.generate(ids, attention_mask=mask, max_new_tokens=max(work.output_lens), **options)
        out[0, -1].item()  # waits for the device
        assert out.shape[1] == ids.shape[1] + max(work.output_lens)
        return perf_counter() - start


def read_bandwidth(device: torch.device, num_bytes: int = 1 << 30, repetitions: int = 5) -> float:
    """Bytes per second at which this device reads memory: the best of a few maxima over a large tensor."""
    data = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device)

    def seconds() -> float:
        start = perf_counter()
        data.max().item()
        return perf_counter() - start

    return num_bytes / min(seconds() for _ in range(repetitions))


def least_step_seconds(llm: LLM, bandwidth: float, *, num_seqs: float, context: float) -> float:
    """Time of one decode step that only reads every weight, and the K/V of every sequence, once."""
    model, item = llm.model_config, _runner(llm).dtype.itemsize
    num_weights = model.num_parameters()
    if not model.tie_word_embeddings:  # of an untied embedding only a few rows are read
        num_weights -= model.vocab_size * model.hidden_size
    return (num_weights * item + num_seqs * context * model.kv_bytes_per_token(item)) / bandwidth


def _runner(llm: LLM) -> ModelRunner:
    assert isinstance(llm.engine.executor, ModelRunner)
    return llm.engine.executor


def repeat(count: int, run: Callable[[], Figures]) -> dict[str, dict[str, float]]:
    """Median and range of every figure of `run` over `count` calls."""
    runs = [run() for _ in range(count)]
    names = dict.fromkeys(name for figures in runs for name in figures)  # a run may lack some
    columns = {name: [figures[name] for figures in runs if name in figures] for name in names}
    return {name: {"median": median(c), "min": min(c), "max": max(c)} for name, c in columns.items()}


def show(name: str, figures: dict[str, float], unit: str, scale: float = 1.0) -> None:
    low, middle, high = (f"{scale * figures[key]:.4g}" for key in ("min", "median", "max"))
    print(f"  {name:<24} {middle:>8} {unit} ({low} to {high})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-seqs", type=int, default=32)
    parser.add_argument("--input-len", type=int, nargs=2, default=(16, 256), metavar=("LOW", "HIGH"))
    parser.add_argument("--output-len", type=int, nargs=2, default=(16, 128), metavar=("LOW", "HIGH"))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vs", choices=["transformers"], help="also run this peer on the same work")
    args = parser.parse_args()

    with LLM(args.model, dtype=args.dtype, device=args.device, use_tqdm=False) as llm:
        runner = _runner(llm)
        vocab = llm.model_config.vocab_size
        bandwidth = read_bandwidth(runner.device)
        peer = Transformers(str(find_model(args.model)), runner.dtype, runner.device) if args.vs else None

        def draw(rng: random.Random, count: int, inputs: list[int], outputs: list[int]) -> Workload:
            return Workload.draw(rng, count, (inputs[0], inputs[1]), (outputs[0], outputs[1]), vocab)

        def stream_and_batch(rng: random.Random) -> Figures:
            """One repetition; the peer does the same work right after us, so that both meet the same moment of the machine."""
            stream = draw(rng, 1, [STREAM_TOKENS] * 2, [STREAM_TOKENS] * 2)
            batch = draw(rng, args.num_seqs, args.input_len, args.output_len)
            figures = run_stream(llm, stream, bandwidth)
            theirs = peer.stream(stream) if peer else {}
            figures |= run_batch(llm, batch, bandwidth)
            theirs |= peer.batch(batch) if peer else {}
            for name, value in theirs.items():
                figures[f"transformers {name}"] = value
                figures[f"times as fast, {name}"] = (
                    figures[name] / value if name.endswith("tok_s") else value / figures[name]
                )
            return figures

        stream_and_batch(random.Random(args.seed - 1))  # warm-up
        rng = random.Random(args.seed)
        result: dict[str, Any] = repeat(args.repeat, lambda: stream_and_batch(rng))

        print(f"\none stream, {STREAM_TOKENS} + {STREAM_TOKENS} tokens, {args.repeat} repetitions: median (range)")
        show("TTFT", result["ttft_ms"], "ms")
        show("TPOT", result["tpot_ms"], "ms")
        show("  share of the limit", result["tpot_share_of_limit"], "%", 100)
        print(f"{args.num_seqs} requests at once, prompts of {args.input_len}, outputs of {args.output_len} tokens")
        show("throughput", result["output_tok_s"], "output tok/s")
        show("prefill", result["prefill_tok_s"], "tok/s")
        if "decode_tok_s" in result:
            show("decode", result["decode_tok_s"], "tok/s")
            show("  share of the limit", result["decode_share_of_limit"], "%", 100)
        print(
            f"limit: this device reads {bandwidth / 1e9:.1f} GB/s; a step reads every weight and the K/V of its sequences once"
        )
        for name in [name for name in result if name.startswith("transformers ")]:
            show(name, result[name], "")
            metric = name.removeprefix("transformers ")
            show("  nanoengine", result[f"times as fast, {metric}"], "times as fast")

        result["config"] = vars(args) | {
            "backend": runner.backend.name,
            "used_dtype": str(runner.dtype),
            "used_device": str(runner.device),
        }
        result["read_gb_s"] = bandwidth / 1e9
        result["threads"] = torch.get_num_threads()
        result["versions"] = {
            "nanoengine": nanoengine.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        print(json.dumps(result))


if __name__ == "__main__":
    try:
        main()
    except NanoEngineError as error:
        sys.exit(f"{type(error).__name__}: {error}")
